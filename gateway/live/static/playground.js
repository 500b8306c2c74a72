// The playground: it sends one request, shows its answer as it comes, and where the request is meanwhile.
import { byId, fillList, make, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { NONE, count, rate, seconds, stageName, STAGES, whole } from "./format.js";
import { API, getJson } from "./paths.js";
import { chunks } from "./stream.js";
import { Timeline, whereNow } from "./timeline.js";

const POLL_MS = 500;
const MOST_FAILURES = 3;  // of polls, one after the other
const PATHS = { chat: "chat/completions", completion: "completions" };

export class Playground {
  constructor() {
    this.model = "";
    this.busy = false;
    this.running = null;
    this.turns = [];  // of a conversation that may be continued
    this.timeline = new Timeline(byId("playground-timeline"), byId("playground-timeline-table"));
    byId("playground-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("playground-form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground-form").requestSubmit();
    });
    byId("playground-form").addEventListener("change", () => this.follow());
    byId("playground-stop").addEventListener("click", () => this.running?.abort.abort());
    byId("playground-forget").addEventListener("click", () => {
      this.turns = [];
      this.follow();
      byId("playground-prompt").focus();
    });
    this.follow();
  }

  /** The view is shown for the first time: which model is it? */
  async start() {
    if (this.model) return;
    try {
      this.model = (await getJson(new URL("models", API))).data[0].id;
      setText(byId("playground-model"), this.model);
    } catch (error) {
      setText(byId("playground-model"), `The models could not be read: ${error.message}`);
    }
  }

  /** Without a chat template, the model's chat endpoint refuses every request. */
  offer(chat) {
    const button = byId("playground-chat");
    if (button.disabled === !chat) return;
    button.disabled = !chat;
    setHidden(byId("playground-no-chat"), chat);
    if (!chat) byId("playground-completion").checked = true;
    this.follow();
  }

  get isChat() {
    return byId("playground-chat").checked;
  }

  /** What depends on the form's choices. */
  follow() {
    for (const node of document.querySelectorAll(".chat-only")) setHidden(node, !this.isChat);
    const continues = this.isChat && byId("playground-continue").checked;
    setHidden(byId("playground-forget"), !(continues && this.turns.length));
    setHidden(byId("playground-earlier"), !(continues && this.turns.length));
    setText(byId("playground-earlier-words"), `Earlier turns (${this.turns.length})`);
    fillList(byId("playground-turns"), this.turns.map((turn) => `${turn.role}: ${turn.content}`));
  }

  // ---- the request

  /** Raises an Error with a message for the user. */
  body() {
    const body = {
      model: this.model,
      stream: true,
      stream_options: { include_usage: true },
      include_timings: true,
    };
    for (const field of byId("playground-form").querySelectorAll("input[name][type=number]")) {
      if (field.value !== "") body[field.name] = Number(field.value);
    }
    const stops = byId("playground-stop-strings").value.split("\n").filter((line) => line !== "");
    if (stops.length) body.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    const schema = byId("playground-schema").value.trim();
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parseSchema(schema) } };

    const prompt = byId("playground-prompt").value;
    if (!this.isChat) return { ...body, prompt };
    const system = byId("playground-system").value.trim();
    return {
      ...body,
      messages: [
        ...(system ? [{ role: "system", content: system }] : []),
        ...(byId("playground-continue").checked ? this.turns : []),
        { role: "user", content: prompt },
      ],
    };
  }

  async send() {
    if (this.busy) return;
    this.busy = true;
    await this.answer();
    this.busy = false;
  }

  async answer() {
    setText(byId("playground-error"), "");
    setAttribute(byId("playground-schema"), "aria-invalid", false);
    await this.start();
    let body;
    try {
      body = this.body();
    } catch (error) {
      setText(byId("playground-error"), error.message);
      setAttribute(byId("playground-schema"), "aria-invalid", true);
      byId("playground-schema").closest("details").open = true;
      byId("playground-schema").focus();
      return;
    }
    const run = new Run(new URL(PATHS[this.isChat ? "chat" : "completion"], API), body, this.timeline);
    this.running = run;
    this.buttons(true);
    await run.finish();
    this.running = null;
    this.buttons(false);
    if (this.isChat && !run.failed && run.text) {
      if (!byId("playground-continue").checked) this.turns = [];
      this.turns.push({ role: "user", content: byId("playground-prompt").value }, { role: "assistant", content: run.text });
      this.follow();
    }
  }

  /** Focus goes to the button that can be pressed, so that the keyboard never loses its place. */
  buttons(running) {
    const [send, stop] = [byId("playground-send"), byId("playground-stop")];
    const from = running ? send : stop;
    const had = document.activeElement === from;
    send.disabled = running;
    stop.disabled = !running;
    if (had) (running ? stop : send).focus();
  }
}

function parseSchema(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The JSON schema is not valid JSON: ${error.message}`);
  }
}

let newest = null;

/** One request, from its sending to its end. */
class Run {
  constructor(url, body, timeline) {
    this.abort = new AbortController();
    this.url = url;
    this.body = body;
    this.timeline = timeline;
    this.id = "";
    this.sentId = `playground-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;  // until it has an id
    this.text = "";
    this.pending = { answer: "", reasoning: "" };  // not drawn yet
    this.frame = 0;
    this.sentMs = performance.now();
    this.firstMs = this.lastMs = null;
    this.finish_reason = this.usage = this.timings = null;
    this.failed = this.over = false;
    newest = this;
    this.clear();
  }

  clear() {
    for (const id of ["playground-answer", "playground-reasoning"]) byId(id).replaceChildren(document.createTextNode(""));
    setAttribute(byId("playground-answer"), "aria-busy", true);
    for (const id of ["playground-reasoning-box", "playground-table-box", "playground-open"]) setHidden(byId(id), true);
    reconcile(byId("playground-timings"), [], String, make, () => {});
    this.timeline.clear();
    this.state("waiting", "Waiting for the first token.");
    setText(byId("playground-now"), "");
  }

  async finish() {
    this.poll(0);
    try {
      for await (const chunk of chunks(this.url, this.body, this.abort.signal, this.sentId)) this.take(chunk);
      this.state("done", this.finish_reason === "length" ? "Ended at the limit of tokens." : `Ended: ${this.finish_reason ?? "stop"}.`);
    } catch (error) {
      if (this.abort.signal.aborted) this.state("stopped", "Stopped by you.");
      else {
        this.failed = true;
        this.state("failed", "Failed.");
        setText(byId("playground-error"), error.message);
      }
    }
    this.over = true;
    this.draw();
    setAttribute(byId("playground-answer"), "aria-busy", false);
    if (!this.id) setText(byId("playground-now"), "The request ended before its first token.");
  }

  state(name, words) {
    setAttribute(byId("playground-state"), "data-state", name);
    setText(byId("playground-state"), words);
  }

  take(chunk) {
    if (!this.id && chunk.id) this.begin(chunk.id);
    const choice = chunk.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    const reasoning = choice?.delta?.reasoning_content ?? "";
    if (text || reasoning) {
      this.lastMs = performance.now();
      if (this.firstMs === null) {
        this.firstMs = this.lastMs;
        this.state("streaming", "Streaming.");
      }
    }
    this.text += text;
    this.pending.answer += text;
    this.pending.reasoning += reasoning;
    this.finish_reason = choice?.finish_reason ?? this.finish_reason;
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    for (const [part, text] of Object.entries(this.pending)) {
      if (text) byId(`playground-${part}`).firstChild.appendData(text);
      this.pending[part] = "";
    }
    if (byId("playground-reasoning").textContent) setHidden(byId("playground-reasoning-box"), false);
    reconcile(byId("playground-timings"), this.figures(), ([name]) => name, () => make("div", {}, make("dt"), make("dd")), (node, [name, value]) => {
      setText(node.firstElementChild, name);
      setText(node.lastElementChild, value);
    });
  }

  figures() {
    const { usage, timings } = this;
    const tokens = usage?.completion_tokens ?? null;
    const streamedS = this.firstMs === null ? null : (this.lastMs - this.firstMs) / 1e3;
    const figures = [
      ["First token after", this.firstMs === null ? NONE : seconds((this.firstMs - this.sentMs) / 1e3)],
      ["In all", this.lastMs === null ? NONE : seconds((this.lastMs - this.sentMs) / 1e3)],
    ];
    if (tokens !== null) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      figures.push(["Prompt", count(usage.prompt_tokens, "token") + (cached ? `, ${whole(cached)} cached` : "")], ["Answer", count(tokens, "token")]);
      if (tokens > 1 && streamedS) figures.push(["Per token", seconds(streamedS / (tokens - 1))], ["Speed", rate((tokens - 1) / streamedS, "tokens")]);
    }
    if (timings) {
      for (const stage of Object.keys(STAGES)) figures.push([`In ${stageName(stage)}`, seconds(timings[`${stage}_s`])]);
      if (timings.bubble_s !== undefined) figures.push(["Bubble", seconds(timings.bubble_s)]);
      figures.push(["Instances", [timings.prefill_id, timings.decode_id].filter(Boolean).join(", ") || NONE]);
    }
    return figures;
  }

  // ---- where it is

  begin(id) {
    this.id = id;
    byId("playground-open").href = `#request=${encodeURIComponent(id)}`;
    setHidden(byId("playground-open"), false);
  }

  async poll(failures) {
    const last = this.over;  // once more after the end, for the whole timeline
    if (this.isOld()) return;
    try {
      const { requests } = await getJson(`requests?id=${encodeURIComponent(this.id || this.sentId)}`);
      if (this.isOld()) return;
      if (requests.length) this.showWhere(requests[0]);
      if (requests.length && !requests[0].open) return;
      failures = last ? failures + 1 : 0;
    } catch (error) {
      failures += 1;
      if (!this.isOld()) setText(byId("playground-now"), `Where it is cannot be read: ${error.message}`);
    }
    if (failures < MOST_FAILURES) window.setTimeout(() => this.poll(failures), POLL_MS);
  }

  showWhere(detail) {
    if (!this.id) this.begin(detail.id);
    this.timeline.show(detail);
    setHidden(byId("playground-table-box"), !detail.timeline?.length);
    setText(byId("playground-now"), detail.open ? `Now: ${whereNow(detail)}.` : `It has ended after ${seconds(detail.took_s)}: ${detail.outcome}.`);
  }

  /** A newer request has taken the timeline. */
  isOld() {
    return newest !== this;
  }
}
