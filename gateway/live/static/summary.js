// The figures at the top, problems, and open requests by state.
import { byId, fillList, make, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { NONE, compact, count, percent, rate, seconds, whole } from "./format.js";

const STATES = [
  ["queued", "queue", "in the queue"],
  ["prefilling", "prefill", "prefill"],
  ["waiting_in_pool", "pool", "waiting in the pool"],
  ["prefetched", "prefetch", "prefetched"],
  ["decoding", "decode", "decoding"],
];

let announced = null;

export function showSummary(state) {
  const { health, rates } = state;
  const words = healthWords(health);
  setText(byId("model"), state.model ?? "");
  setText(byId("cluster"), state.cluster ? `· cluster ${state.cluster}` : "");
  setText(byId("version"), state.version ? `· ${state.version}` : "");
  setText(byId("health"), health.state);
  setAttribute(byId("health"), "data-state", health.state);
  setText(byId("health-note"), words.note);
  announce(words.whole);

  figure("requests-per-s", rates.requests_per_s, rate(rates.requests_per_s, "requests"));
  setText(byId("requests-note"), requestsNote(state));
  figure("tokens-per-s", rates.output_tokens_per_s, rate(rates.output_tokens_per_s, "tokens"));
  setText(byId("tokens-note"), `prompts: ${rate(rates.prompt_tokens_per_s, "tokens")}`);
  quantiles("ttft", rates.ttft_s);
  quantiles("itl", rates.itl_s);
  figure("bubble", rates.bubble_share, percent(rates.bubble_share));
  const how = rates.bubble_learned ? "as learned" : "predicted";
  setText(byId("bubble-note"), rates.bubble_share === null ? "not known yet" : `of the iterations' time, ${how}`);

  const problems = [
    ...health.missing.map((role) => `A required process is missing: ${role}`),
    ...health.degraded,
  ];
  setHidden(byId("problems"), problems.length === 0);
  fillList(byId("problems"), problems);
  showStages(state.requests);
}

function healthWords({ state, missing, degraded }) {
  const parts = [];
  if (missing.length) parts.push(`${missing.join(", ")} missing`);
  if (degraded.length) parts.push(count(degraded.length, "problem"));
  const note = parts.join(", ") || (state === "ready" ? "every process is there" : "");
  return { note, whole: `The cluster is ${state}.${parts.length ? ` ${parts.join(", ")}.` : ""}` };
}

/** Only a change is announced, not what the page begins with. */
function announce(words) {
  if (announced !== null && announced !== words) setText(byId("health-announcement"), words);
  announced = words;
}

function figure(id, value, text) {
  setText(byId(id), text);
  setAttribute(byId(id), "data-value", value);
}

function quantiles(id, found) {
  const node = byId(id);
  const [p50, p99] = [found?.p50 ?? null, found?.p99 ?? null];
  setAttribute(node, "data-p50", p50);
  setAttribute(node, "data-p99", p99);
  reconcile(node, [["P50", p50], ["P99", p99]], ([name]) => name, makeQuantile, (span, [name, value]) => {
    setText(span.firstElementChild, `${name} `);
    setText(span.children[1], seconds(value));
  });
}

function makeQuantile() {
  return make("span", { class: "quantile" }, make("small"), make("span"), " ");
}

function requestsNote({ rates, requests }) {
  const parts = [`${whole(requests.open)} open`];
  if (rates.refused_per_s) parts.push(`${compact(rates.refused_per_s)} refused/s`);
  if (rates.failed_per_s) parts.push(`${compact(rates.failed_per_s)} failed/s`);
  return parts.join(", ");
}

function showStages(requests) {
  reconcile(byId("stages"), STATES, ([field]) => field, makeStage, (node, [field, , name]) => {
    const value = requests[field] ?? null;
    setAttribute(node, "data-count", value);
    setText(node.firstElementChild, value === null ? NONE : whole(value));
    setText(node.lastElementChild, ` ${name}`);
  });
}

function makeStage([field, stage]) {
  return make("li", { "data-state": field, class: `stage-${stage}` }, make("strong"), make("span"));
}
