// Waiting requests by prefix length, and under them what each decode instance runs and gets next, on the same axis.
import { LengthAxis } from "./axis.js";
import { byId, fillTable, make, makeSvg, reconcile, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { NONE, compact, count, percent, range, rate, span, sum, whole } from "./format.js";
import { storeWords } from "./stores.js";

const MOST_TALL = 6;  // with more decode instances the strips are compact

const axis = new LengthAxis();

// [class, top and height in a strip that is 100 high]
const LANES = {
  running: [0, 54],
  next: [60, 17],
  late: [83, 17],
};

export function showLengths(state) {
  axis.follow(state, performance.now());
  showAxis();
  showHistogram(state.waiting);
  const tall = state.decode.length <= MOST_TALL;
  byId("lengths").classList.toggle("compact", !tall);
  reconcile(byId("strips"), state.decode, (one) => one.id, makeStrip, (row, one) => updateStrip(row, one, tall));
  setHidden(byId("strips-empty"), state.decode.length > 0);
  if (byId("decode-details").open) showDecodeTable(state.decode);
}

function showAxis() {
  setAttribute(byId("histogram-grid"), "d", axis.grid());
  reconcile(byId("length-axis"), axis.ticks(), ([, length]) => length, () => make("span"), (node, [x, length]) => {
    setText(node, whole(length));
    setStyle(node, "left", `${x / 10}%`);
  });
}

// ---- the histogram

function showHistogram(waiting) {
  const known = waiting !== null;
  const buckets = waiting ?? [];
  const total = sum(buckets.map((bucket) => bucket[2]));
  const peak = Math.max(0, ...buckets.map((bucket) => bucket[2]));
  setAttribute(byId("waiting-histogram"), "data-total", known ? total : null);
  setText(byId("waiting-total"), known ? `${count(total, "request")} wait${total === 1 ? "s" : ""}` : NONE);
  setText(byId("waiting-peak"), peak ? `highest bar: ${whole(peak)}` : "");
  setHidden(byId("waiting-empty"), !known || total > 0);
  const words = known ? histogramWords(buckets, total) : "It is not known what waits: the scheduler tells nothing.";
  setText(byId("waiting-words"), words);
  setAttribute(byId("histogram-plot"), "aria-label", `Waiting requests by prefix length. ${words}`);
  const keyOf = ([first, last]) => `${first}-${last}`;
  reconcile(byId("histogram-bars"), buckets, keyOf, makeBar, (bar, bucket) => updateBar(bar, bucket, peak));
  fillTable(byId("waiting-buckets"), buckets, keyOf, ["", "n", "n"], (bucket) => bucket.map(String), (row, [first, last, waiting]) => {
    setAttribute(row, "data-first", first);
    setAttribute(row, "data-last", last);
    setAttribute(row, "data-count", waiting);
  });
}

function histogramWords(buckets, total) {
  if (total === 0) return "No request waits.";
  const lengths = `${whole(buckets[0][0])} to ${whole(buckets.at(-1)[1])} tokens`;
  let below = 0;
  const middle = buckets.find((bucket) => {
    below += bucket[2];
    return below >= total / 2;
  });
  return `They have ${lengths}; half have at most ${whole(middle[1])}.`;
}

function makeBar() {
  return makeSvg("rect", {}, makeSvg("title"));
}

function updateBar(bar, [first, last, waiting], peak) {
  const left = axis.at(first);
  const height = Math.max(2, (96 * waiting) / peak);
  setAttribute(bar, "x", left.toFixed(1));
  setAttribute(bar, "width", Math.max(2, axis.at(last + 1) - left - 1).toFixed(1));
  setAttribute(bar, "y", (100 - height).toFixed(1));
  setAttribute(bar, "height", height.toFixed(1));
  setText(bar.firstElementChild, `${whole(first)} to ${whole(last)} tokens: ${count(waiting, "request")}`);
}

// ---- decode instances

function makeStrip(one) {
  const name = make(
    "div",
    { class: "length-name" },
    make("strong"),
    make("span", { class: "chip state" }),
    make("span", { class: "chip switch", hidden: "" }, "batch switch"),
  );
  name.firstElementChild.textContent = one.id;
  const plot = makeSvg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" }, makeSvg("path", { class: "grid" }));
  for (const [lane, [top, height]] of Object.entries(LANES)) {
    plot.append(makeSvg("rect", { class: `band ${lane}`, y: top, height }), makeSvg("path", { class: `ticks ${lane}` }));
  }
  const words = make("div", { class: "length-words" }, make("p"), make("p", { class: "more" }), make("p", { class: "more muted" }));
  return make("div", { class: "length-row strip", "data-decode": one.id }, name, make("div", { class: "length-plot" }, plot), words);
}

function updateStrip(row, one, tall) {
  const [name, plotBox, words] = row.children;
  const plot = plotBox.firstElementChild;
  setAttribute(row, "data-running", one.known.running ? one.lengths.length : null);
  setAttribute(row, "data-switching", one.switching);
  setAttribute(row, "data-batch", one.batch);
  setAttribute(row, "data-state", one.state);
  setText(name.children[1], one.state);
  setHidden(name.children[1], one.state === "ready");
  setHidden(name.children[2], !one.switching);

  setAttribute(plot.firstElementChild, "d", axis.grid());
  const lanes = { running: one.lengths, next: one.candidates.batch, late: one.candidates.requests };
  for (const [lane, lengths] of Object.entries(lanes)) drawLane(plot, lane, lengths);

  const runs = runningWords(one, tall);
  setText(words.children[0], runs);
  setText(words.children[1], candidateWords(one));
  setText(words.children[2], paceWords(one));
  const switching = one.switching ? " A batch switch is under way." : "";
  setAttribute(plot, "aria-label", `Prefix lengths at ${one.id}: ${runs}.${switching} ${candidateWords(one)}.`);
}

function drawLane(plot, lane, lengths) {
  const [top, height] = LANES[lane];
  const columns = new Set();
  for (const length of lengths) columns.add(Math.round(axis.at(length)));
  setAttribute(plot.querySelector(`.ticks.${lane}`), "d", Array.from(columns, (x) => `M${x} ${top}v${height}`).join(""));
  const ends = span(lengths);
  const band = plot.querySelector(`.band.${lane}`);
  const left = ends === null ? 0 : axis.at(ends[0]);
  setAttribute(band, "x", left.toFixed(1));
  setAttribute(band, "width", ends === null ? 0 : Math.max(1, axis.at(ends[1]) - left).toFixed(1));
}

function runningWords(one, tall) {
  if (!one.known.running) return NONE;
  const ends = span(one.lengths);
  if (ends === null) return tall ? "Nothing runs" : "idle";
  const times = Number((ends[1] / Math.max(1, ends[0])).toFixed(1));
  if (!tall) return `${whole(one.lengths.length)}: ${range(one.lengths)} (×${times})`;
  return `${runningCount(one)} run, ${range(one.lengths)} tokens; ${times === 1 ? "all alike" : `the longest is ${times} times the shortest`}`;
}

function runningCount({ known, lengths, max_running: most }) {
  if (!known.running) return NONE;
  return most ? `${whole(lengths.length)} of ${whole(most)}` : whole(lengths.length);
}

function candidateWords({ known, candidates }) {
  if (!known.candidates) return `Candidates: ${NONE}`;
  const parts = [];
  if (candidates.batch.length) parts.push(`next: ${whole(candidates.batch.length)} of ${range(candidates.batch)}`);
  if (candidates.requests.length) parts.push(`late or evicted: ${whole(candidates.requests.length)} of ${range(candidates.requests)}`);
  const text = parts.join("; ") || "no candidates";
  return text[0].toUpperCase() + text.slice(1);
}

function paceWords(one) {
  const parts = [`Batch ${one.batch ?? NONE}`, rate(one.iterations_per_s, "iterations")];
  if (one.evictions_per_s) parts.push(rate(one.evictions_per_s, "evictions"));
  if (one.bubble_share !== null) parts.push(`bubble ${percent(one.bubble_share)}`);
  if (one.cache?.capacity && one.cache.owned !== null) parts.push(`cache ${percent(one.cache.owned / one.cache.capacity)} full`);
  return parts.join(" · ");
}

const COLUMNS = ["", "", "n", "n", "n", "n", "n", "n", "n", "n", "n", ""];

export function showDecodeTable(decode) {
  fillTable(byId("decode-rows"), decode, (one) => one.id, COLUMNS, (one) => {
    const ends = span(one.lengths);
    return [
      one.id,
      one.switching ? `${one.state}, batch switch` : one.state,
      runningCount(one),
      ends === null ? NONE : whole(ends[0]),
      ends === null ? NONE : whole(ends[1]),
      one.batch ?? NONE,
      one.known.candidates ? whole(one.candidates.batch.length) : NONE,
      one.known.candidates ? whole(one.candidates.requests.length) : NONE,
      one.iterations_per_s === null ? NONE : `${compact(one.iterations_per_s)}/s`,
      one.evictions_per_s === null ? NONE : `${compact(one.evictions_per_s)}/s`,
      percent(one.bubble_share),
      one.cache ? storeWords(one.cache) : NONE,
    ];
  });
}
