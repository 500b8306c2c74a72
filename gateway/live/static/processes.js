// Processes and events.
import { byId, fillTable, make, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { NONE, clock, seconds } from "./format.js";

export function showProcesses({ roles, now }) {
  const ready = roles.filter((one) => one.state === "ready").length;
  setText(byId("processes-words"), `${ready} of ${roles.length} are ready`);
  fillTable(byId("roles"), roles, (one) => one.id, ["", "", "", "n", "", "", "n", ""], (one) => [
    one.id,
    one.role,
    one.state,
    one.pid ?? NONE,
    one.node ?? NONE,
    one.address || NONE,
    one.started_unix_s ? seconds(Math.floor(Math.max(0, now - one.started_unix_s))) : NONE,
    one.holds || NONE,
  ], (row, one) => {
    setAttribute(row, "data-role", one.id);
    setAttribute(row, "data-state", one.state);
    setAttribute(row, "data-pid", one.pid);
  });
}

export function showEvents({ events }) {
  setHidden(byId("events-empty"), events.length > 0);
  reconcile(byId("events"), events.toReversed(), (one) => `${one.unix_s} ${one.text}`, makeEvent, () => {});
}

/** An event never changes. */
function makeEvent(one) {
  const time = make("time", {}, clock(one.unix_s));
  if (one.unix_s) time.dateTime = new Date(1e3 * one.unix_s).toISOString();
  const level = make("span", { class: "chip level" }, one.level);
  return make("li", { "data-level": one.level }, time, level, make("span", { class: "text" }, one.text));
}
