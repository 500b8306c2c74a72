// One request's time: a bar for each stage that it went through, a lane for each process, and the same as a table.
import { fillTable, make, reconcile, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { NONE, seconds, stageName } from "./format.js";

const NAMED_SHARE = 0.14;  // a narrower bar has no text in it
const MOST_TICKS = 4;

export class Timeline {
  constructor(box, table) {
    this.lanes = make("div", { class: "lanes" });
    this.axis = make("div", { class: "axis" });
    box.setAttribute("role", "img");
    box.append(this.lanes, make("div", { class: "lane lane-axis" }, make("span"), this.axis));
    this.box = box;
    this.body = make("tbody");
    const titles = ["Stage", "Where", "From", "To", "Took"].map((text, column) =>
      make("th", column > 1 ? { scope: "col", class: "n" } : { scope: "col" }, text),
    );
    table.append(make("thead", {}, make("tr", {}, ...titles)), this.body);
    this.clear();
  }

  clear() {
    setHidden(this.box, true);
    reconcile(this.lanes, [], String, make, () => {});
  }

  show(detail) {
    const steps = stepsOf(detail);
    const total = Math.max(1e-6, detail.took_s ?? 0, ...steps.map((step) => step.end));
    const places = [...new Set(steps.map((step) => step.where))];
    setHidden(this.box, steps.length === 0);
    setAttribute(this.box, "aria-label", `Timeline of ${detail.id}: ${inWords(steps)}.`);
    reconcile(this.lanes, places, (where) => where, makeLane, (lane, where) => {
      setText(lane.firstElementChild, where);
      reconcile(lane.lastElementChild, steps.filter((step) => step.where === where), (step) => step.number, makeBar, (bar, step) => updateBar(bar, step, total));
    });
    reconcile(this.axis, ticks(total), (at) => at, () => make("span"), (node, at) => {
      setText(node, seconds(at));
      setStyle(node, "left", `${(100 * at) / total}%`);
    });
    fillTable(this.body, steps, (step) => step.number, ["", "", "n", "n", "n"], (step) => [
      nameOf(step),
      step.where,
      seconds(step.begin),
      step.open ? "now" : seconds(step.end),
      seconds(step.end - step.begin),
    ]);
  }
}

/** The stage that an open request is in, in words. */
export function whereNow(detail) {
  const step = stepsOf(detail).at(-1);
  return step ? `${nameOf(step)} at ${step.where}, for ${seconds(step.end - step.begin)}` : NONE;
}

function stepsOf(detail) {
  return (detail.timeline ?? []).map((step, number, all) => {
    const begin = step.begin_s ?? 0;
    return {
      number,
      stage: step.stage,
      evicted: ["pool", "prefetch"].includes(step.stage) && all[number - 1]?.stage === "decode",
      where: step.where || "unknown process",
      begin,
      end: Math.max(begin, step.end_s ?? detail.took_s ?? begin),
      open: detail.open && number === all.length - 1,
    };
  });
}

/** A request that has decoded waits again because it was evicted. */
function nameOf(step) {
  return step.evicted ? `${stageName(step.stage)}, evicted` : stageName(step.stage);
}

function inWords(steps) {
  return steps.map((step) => `${nameOf(step)} at ${step.where} ${seconds(step.end - step.begin)}`).join(", ");
}

function makeLane() {
  return make("div", { class: "lane" }, make("span", { class: "lane-name" }), make("div", { class: "track" }));
}

function makeBar(step) {
  return make("div", { class: `step stage-${step.stage}`, "data-stage": step.stage });
}

function updateBar(bar, step, total) {
  const took = step.end - step.begin;
  const text = `${nameOf(step)} ${seconds(took)}`;
  setAttribute(bar, "title", `${text}, from ${seconds(step.begin)} to ${seconds(step.end)}`);
  setText(bar, took / total >= NAMED_SHARE ? text : "");
  setStyle(bar, "left", `${((100 * step.begin) / total).toFixed(2)}%`);
  setStyle(bar, "width", `${((100 * took) / total).toFixed(2)}%`);
}

/** Round times from 0 on, a few. */
function ticks(total) {
  const rough = total / MOST_TICKS;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * ten).find((size) => size >= rough);
  return Array.from({ length: Math.floor(total / step) + 1 }, (_, number) => Number((number * step).toPrecision(6)));
}
