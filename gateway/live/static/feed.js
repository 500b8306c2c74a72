// The feed of states. It reconnects by itself, and says when its figures are old.
const SILENT_MS = 5_000;  // the server sends an event each second
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 10_000;
const HIDDEN_MS = 5_000;  // a hidden tab then gives its connection back: a browser has six to a server

export class Feed {
  /**
   * `onState` gets each state; `onStatus` gets "connecting", "live" or "disconnected", when it tries again, and what the
   * server said.
   */
  constructor(url, onState, onStatus) {
    this.url = url;
    this.onState = onState;
    this.onStatus = onStatus;
    this.source = null;
    this.heardMs = 0;
    this.failures = 0;
    this.retryTimer = 0;
    this.hideTimer = 0;
    document.addEventListener("visibilitychange", () => this.seen());
    window.setInterval(() => this.watch(), 1_000);
    this.open();
    this.seen();
  }

  open() {
    window.clearTimeout(this.retryTimer);
    this.retryTimer = 0;
    this.source = new EventSource(this.url);
    this.heardMs = performance.now();
    this.source.addEventListener("state", (event) => this.hear(event.data));
    this.source.addEventListener("error", () => this.lose());
    if (this.failures === 0) this.onStatus("connecting", 0, "");
  }

  hear(data) {
    this.heardMs = performance.now();
    this.failures = 0;
    this.onStatus("live", 0, "");
    this.onState(JSON.parse(data));
  }

  lose() {
    this.close();
    const waitMs = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures);
    this.failures += 1;
    const againMs = Date.now() + waitMs;
    this.onStatus("disconnected", againMs, "");
    this.retryTimer = window.setTimeout(() => this.open(), waitMs);
    this.askWhy().then((reason) => {
      if (reason && this.source === null) this.onStatus("disconnected", againMs, reason);
    });
  }

  /** An EventSource hides why it failed. Shows the login form if the key is no longer valid. */
  async askWhy() {
    const abort = new AbortController();
    const timer = window.setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await fetch(this.url, { signal: abort.signal, cache: "no-store" });
      if (response.status === 401) window.location.reload();
      return response.ok ? "" : (await response.json()).error.message;
    } catch {
      return "";  // there is no server, or no gateway behind it
    } finally {
      window.clearTimeout(timer);
      abort.abort();
    }
  }

  watch() {
    if (this.source !== null && performance.now() - this.heardMs > SILENT_MS) this.lose();
  }

  seen() {
    window.clearTimeout(this.hideTimer);
    if (document.hidden) {
      this.hideTimer = window.setTimeout(() => this.rest(), HIDDEN_MS);
    } else if (this.source === null) {
      this.failures = 0;
      this.open();
    }
  }

  rest() {
    window.clearTimeout(this.retryTimer);
    this.close();
  }

  close() {
    this.source?.close();
    this.source = null;
  }
}
