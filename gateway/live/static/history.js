// Plots of the last five minutes, from the states that this page has seen.
import { byId, make, reconcile, setAttribute, setText } from "./dom.js";
import { compact, rate, seconds, whole } from "./format.js";

const KEEP_S = 300;
const HEIGHT = 150;
const GAP_S = 5;  // a longer pause between states is a gap in the lines
const BACK_S = 5;  // a state that is older by more is of another gateway, whose clock is behind

const PLOTS = [
  { name: "Output tokens", show: (value) => rate(value, "tokens"), short: compact, lines: [["tokens", "decode", (s) => s.rates.output_tokens_per_s]] },
  { name: "Time to first token", show: seconds, short: seconds, lines: [["P50", "prefill", (s) => s.rates.ttft_s?.p50], ["P99", "prefetch", (s) => s.rates.ttft_s?.p99]] },
  { name: "Inter-token time", show: seconds, short: seconds, lines: [["P50", "prefill", (s) => s.rates.itl_s?.p50], ["P99", "prefetch", (s) => s.rates.itl_s?.p99]] },
  {
    name: "Requests by state",
    show: whole,
    short: compact,
    lines: [
      ["queue", "queue", (s) => s.requests.queued],
      ["prefill", "prefill", (s) => s.requests.prefilling],
      ["pool", "pool", (s) => s.requests.waiting_in_pool],
      ["prefetched", "prefetch", (s) => s.requests.prefetched],
      ["decode", "decode", (s) => s.requests.decoding],
    ],
  },
];
const DASHES = { P99: [5, 3] };

const times = [];
const columns = PLOTS.map(({ lines }) => lines.map(() => []));
let plots = [];

/** Called for each state, also while nobody looks. */
export function remember(state) {
  if (times.length && state.now < times.at(-1) - BACK_S) forget();
  if (times.length && state.now <= times.at(-1)) return;
  if (times.length && state.now > times.at(-1) + GAP_S) append(times.at(-1) + 1, () => null);
  append(state.now, (read) => read(state) ?? null);
  while (times.length && times[0] < state.now - KEEP_S) {
    times.shift();
    columns.forEach((lines) => lines.forEach((values) => values.shift()));
  }
}

function forget() {
  for (const values of [times, ...columns.flat()]) values.length = 0;
}

function append(at, valueOf) {
  times.push(at);
  PLOTS.forEach(({ lines }, plot) => lines.forEach(([, , read], line) => columns[plot][line].push(valueOf(read))));
}

export function showHistory() {
  if (times.length === 0) return;
  if (plots.length === 0) plots = PLOTS.map(makePlot);
  plots.forEach((plot) => plot.update());
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function makePlot(plan, number) {
  const box = make("div", { class: "plot" });
  const legend = make("ul", { class: "legend" });
  const figure = make("figure", { role: "img" }, make("figcaption", {}, make("strong", {}, plan.name), legend), box);
  byId("history").append(figure);
  let pointed = null;  // where the pointer is; null: the newest values are shown

  const chart = new window.uPlot(
    {
      width: Math.max(120, box.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "history" } },
      scales: {
        x: { time: false, range: () => [times.at(-1) - KEEP_S, times.at(-1)] },
        y: { range: (_, __, most) => [0, most > 0 ? 1.1 * most : 1] },
      },
      axes: [
        { ...axisStyle(), size: 24, space: 40, splits: minutes, values: (_, splits) => splits.map(ago) },
        { ...axisStyle(), size: 52, space: 30, values: (_, splits) => splits.map((value) => plan.short(value)) },
      ],
      series: [{}, ...plan.lines.map(([name, stage]) => ({
        label: name,
        stroke: () => colour(`--${stage}`),
        width: 1.5,
        dash: DASHES[name],
        points: { show: false },
      }))],
      hooks: { setCursor: [(self) => {
        pointed = self.cursor.left >= 0 ? self.cursor.idx : null;
        showLegend();
      }] },
    },
    [times, ...columns[number]],
    box,
  );
  new ResizeObserver(() => chart.setSize({ width: Math.max(120, box.clientWidth), height: HEIGHT })).observe(box);
  document.addEventListener("themechange", () => chart.redraw(false, true));

  function showLegend() {
    reconcile(legend, plan.lines, ([name]) => name, makeEntry, (node, [name]) => {
      setText(node.lastElementChild, `${name} ${plan.show(valueAt(name))}`);
    });
  }

  function valueAt(name) {
    const values = columns[number][plan.lines.findIndex((line) => line[0] === name)];
    return values[pointed ?? values.length - 1] ?? null;
  }

  function describe() {
    const parts = plan.lines.map(([name], line) => {
      const values = columns[number][line].filter((value) => value !== null);
      if (values.length === 0) return `${name}: nothing`;
      return `${name}: now ${plan.show(columns[number][line].at(-1))}, lowest ${plan.show(Math.min(...values))}, highest ${plan.show(Math.max(...values))}`;
    });
    setAttribute(figure, "aria-label", `${plan.name}, last five minutes. ${parts.join("; ")}.`);
  }

  return {
    update() {
      chart.setData([times, ...columns[number]]);
      setAttribute(figure, "data-newest", times.at(-1));
      showLegend();
      describe();
    },
  };
}

function makeEntry([name, stage]) {
  return make("li", {}, make("i", { class: `line stage-${stage}${DASHES[name] ? " dashed" : ""}` }), make("span"));
}

function axisStyle() {
  return {
    stroke: () => colour("--muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: () => colour("--rule"), width: 1 },
    ticks: { show: false },
  };
}

function minutes() {
  const newest = times.at(-1);
  return [4, 3, 2, 1, 0].map((back) => newest - 60 * back);
}

function ago(at) {
  const back = Math.round((times.at(-1) - at) / 60);
  return back === 0 ? "now" : `−${back} min`;
}
