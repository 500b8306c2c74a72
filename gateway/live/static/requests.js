// Lists of requests, and where the time of one of them went.
import { byId, fillList, fillTable, make, reconcile, setAttribute, setHidden, setText } from "./dom.js";
import { NONE, STAGES, clock, count, seconds, stageName, sum, whole } from "./format.js";
import { getJson } from "./paths.js";
import { Timeline } from "./timeline.js";

const POLL_MS = 1_000;
const NEWEST_MS = 2_000;
const MOST = 50;
const COLUMNS = [["Request", ""], ["Took", "n"], ["First token", "n"], ["In", "n"], ["Out", "n"], ["Where its time went", ""], ["Outcome", ""]];
const FINE = ["stop", "length", "open", "cancelled", "tool_calls", "function_call"];

export class Requests {
  /** `isSeen` says whether this view is shown. */
  constructor(isSeen) {
    this.isSeen = isSeen;
    this.openId = "";
    this.pollTimer = 0;
    this.newestTimer = 0;
    this.slowest = [];
    this.timeline = new Timeline(byId("timeline"), byId("timeline-table"));
    for (const id of ["slowest", "newest"]) prepare(byId(id));
    byId("show-slowest").addEventListener("click", () => this.list("slowest"));
    byId("show-newest").addEventListener("click", () => this.list("newest"));
    byId("request-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("request-search").value.trim();
      if (id) goTo(id);
    });
  }

  /** The slowest ones are part of each state. */
  show({ slowest }) {
    this.slowest = slowest;
    fillRequests(byId("slowest"), slowest);
    if (!byId("slowest").hidden) setHidden(byId("requests-empty"), slowest.length > 0);
  }

  list(name) {
    for (const one of ["slowest", "newest"]) {
      setHidden(byId(one), one !== name);
      setAttribute(byId(`show-${one}`), "aria-pressed", one === name);
    }
    setText(byId("requests-empty"), "There was no request yet.");
    setHidden(byId("requests-empty"), name === "newest" || this.slowest.length > 0);
    window.clearTimeout(this.newestTimer);
    if (name === "newest") this.fetchNewest();
  }

  async fetchNewest() {
    if (this.isSeen()) {
      try {
        const { requests } = await getJson(`requests?sort=newest&most=${MOST}`);
        fillRequests(byId("newest"), requests);
        setText(byId("requests-empty"), "There was no request yet.");
        setHidden(byId("requests-empty"), requests.length > 0 || byId("newest").hidden);
      } catch (error) {
        setText(byId("requests-empty"), `The list could not be read: ${error.message}`);
        setHidden(byId("requests-empty"), false);
      }
    }
    window.clearTimeout(this.newestTimer);
    if (!byId("newest").hidden) this.newestTimer = window.setTimeout(() => this.fetchNewest(), NEWEST_MS);
  }

  // ---- one request

  async open(id) {
    this.openId = id;
    byId("request-search").value = id;
    setText(byId("request-heading"), `Request ${id}`);
    this.say("Loading…");
    await this.fetch(id);
    if (this.openId === id) byId("request-heading").focus();
  }

  async fetch(id) {
    window.clearTimeout(this.pollTimer);
    let open = true;
    if (this.isSeen()) {
      try {
        const detail = await getJson(`requests/${encodeURIComponent(id)}`);
        if (this.openId !== id) return;
        this.showDetail(detail);
        open = detail.open;
      } catch (error) {
        if (this.openId !== id) return;
        this.say(`It cannot be shown: ${error.message}`);
        open = !(error.status >= 400 && error.status < 500);  // a gateway that is being replaced has a successor
      }
    }
    if (open) this.pollTimer = window.setTimeout(() => this.fetch(id), POLL_MS);
  }

  say(message) {
    setText(byId("request-message"), message);
    setHidden(byId("request-message"), false);
    setHidden(byId("request-body"), true);
  }

  showDetail(detail) {
    setHidden(byId("request-message"), true);
    setHidden(byId("request-body"), false);
    setAttribute(byId("request"), "data-request", detail.id);
    setAttribute(byId("request"), "data-open", detail.open);
    setText(byId("request-facts"), facts(detail));
    this.timeline.show(detail);
    this.showOthers(detail.others ?? []);
    for (const [box, list, said] of [["request-said", "request-explanation", detail.explanation], ["request-advised", "request-advice", detail.advice]]) {
      setHidden(byId(box), !said?.length);
      fillList(byId(list), said ?? []);
    }
    setHidden(byId("request-stays"), !detail.stays?.length);
    fillTable(byId("stay-rows"), (detail.stays ?? []).map((stay, number) => ({ ...stay, number })), (stay) => stay.number, ["", "n", "n", "n", "n", "n", "n"], (stay) => [
      stay.decode_id || NONE,
      whole(stay.kv_tokens),
      seconds(stay.waited_s),
      whole(stay.ahead),
      whole(stay.sent_first),
      whole(stay.shorter),
      whole(stay.longer),
    ]);
  }

  /** The other requests of the same call. */
  showOthers(others) {
    setHidden(byId("request-others"), others.length === 0);
    reconcile(byId("request-others-list"), others, (one) => one.request_id, makeOther, () => {});
  }
}

function makeOther(one) {
  return make("li", {}, make("a", { href: `#request=${encodeURIComponent(one.request_id)}` }, one.request_id));
}

/** The address has the request, so a timeline can be linked to. */
export function goTo(id) {
  const hash = `#request=${encodeURIComponent(id)}`;
  if (window.location.hash === hash) window.dispatchEvent(new HashChangeEvent("hashchange"));
  else window.location.hash = hash;
}

function facts(detail) {
  const cached = detail.cached_tokens ? ` (${whole(detail.cached_tokens)} cached)` : "";
  const parts = [
    detail.open ? "Open" : `Outcome: ${detail.outcome}`,
    `arrived at ${clock(detail.arrival_unix_s)}`,
    `${detail.open ? "has taken" : "took"} ${seconds(detail.took_s)}`,
    detail.first_token_s === null ? "no token yet" : `first token after ${seconds(detail.first_token_s)}`,
    `${count(detail.input_tokens, "input token")}${cached}`,
    count(detail.output_tokens, "output token"),
  ];
  if (detail.losses) parts.push(`submitted ${detail.losses + 1} times`);
  if (detail.resumed_tokens != null) parts.push(`resumed after ${count(detail.resumed_tokens, "token")}`);
  return parts.join(" · ");
}

// ---- lists

function prepare(table) {
  const titles = COLUMNS.map(([text, name]) => make("th", name ? { scope: "col", class: name } : { scope: "col" }, text));
  table.append(make("thead", {}, make("tr", {}, ...titles)), make("tbody"));
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-request]");
    if (row) goTo(row.dataset.requestId);  // a call's id may stand for several requests
  });
}

function fillRequests(table, requests) {
  reconcile(table.tBodies[0], requests, (one) => one.request_id ?? one.id, makeRequest, (row, one) => {
    const [, took, first, input, output, stages, outcome] = row.cells;
    setText(took, seconds(one.took_s));
    setText(first, seconds(one.first_token_s));
    setText(input, whole(one.input_tokens));
    setText(output, whole(one.output_tokens));
    updateShares(stages.firstElementChild, one.stages ?? {});
    setText(outcome, one.outcome);
    outcome.classList.toggle("bad", !FINE.includes(one.outcome));
  });
}

function makeRequest(one) {
  const button = make("button", { type: "button", class: "link", title: one.id, "aria-label": `Timeline of ${one.id}` }, one.id);
  const row = make("tr", { "data-request": one.id, "data-request-id": one.request_id ?? one.id }, make("th", { scope: "row" }, button));
  for (const [, name] of COLUMNS.slice(1)) row.append(make("td", name ? { class: name } : {}));
  row.cells[5].append(make("div", { class: "shares", role: "img" }));
  return row;
}

function updateShares(bar, stages) {
  const parts = ["lost", "until_first_token", ...Object.keys(STAGES)].filter((stage) => stages[stage] > 0);
  const total = sum(parts.map((stage) => stages[stage]));
  const words = parts.map((stage) => `${stageName(stage)} ${seconds(stages[stage])}`).join(", ") || "no stage has ended";
  setAttribute(bar, "aria-label", words);
  setAttribute(bar, "title", words);
  reconcile(bar, parts, (stage) => stage, (stage) => make("i", { class: `stage-${stage}` }), (node, stage) => {
    node.style.width = `${((100 * stages[stage]) / total).toFixed(2)}%`;
  });
}
