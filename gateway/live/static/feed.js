// The feed of states. It reconnects by itself, and says when its figures are old.
import { getJson } from "./paths.js";

const SILENT_MS = 5_000;  // the server sends an event each second
const FIRST_WAIT_MS = 1_000;
const LONGEST_WAIT_MS = 10_000;
const HIDDEN_MS = 300_000;  // a tab that nobody sees costs the server nothing after that

export class Feed {
  /** `onState` gets each state; `onStatus` gets "connecting", "live" or "disconnected", and when it tries again. */
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
  }

  open() {
    window.clearTimeout(this.retryTimer);
    this.retryTimer = 0;
    this.source = new EventSource(this.url);
    this.heardMs = performance.now();
    this.source.addEventListener("state", (event) => this.hear(event.data));
    this.source.addEventListener("error", () => this.lose());
    if (this.failures === 0) this.onStatus("connecting", 0);
  }

  hear(data) {
    this.heardMs = performance.now();
    this.failures = 0;
    this.onStatus("live", 0);
    this.onState(JSON.parse(data));
  }

  lose() {
    this.close();
    const waitMs = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures);
    this.failures += 1;
    this.onStatus("disconnected", Date.now() + waitMs);
    this.retryTimer = window.setTimeout(() => this.open(), waitMs);
    // An EventSource hides why it failed. This finds out whether the key is no longer valid, and then shows the login form.
    if (this.failures === 1) getJson("requests?most=1").catch(() => {});
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
