// The dashboard's page: it takes states from the feed and draws them, at most once in a frame and only if seen.
import { byId, setAttribute, setHidden, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { clock } from "./format.js";
import { remember, showHistory } from "./history.js";
import { showDecodeTable, showLengths } from "./lengths.js";
import { HERE, hasSignedIn, rememberSignIn } from "./paths.js";
import { Playground } from "./playground.js";
import { showEvents, showProcesses } from "./processes.js";
import { Requests } from "./requests.js";
import { showChannels, showPool, showPrefill } from "./stores.js";
import { showSummary } from "./summary.js";

const VIEWS = ["live", "playground"];

let latest = null;
let scheduled = false;
let view = "live";
let retryAtMs = 0;
let reason = "";  // of the server, for not showing more

const requests = new Requests(() => view === "live" && !document.hidden);
const playground = new Playground();

// ---- states

/** Fields that the server left out, or could not know, have a value that draws nothing; what waits is null then. */
function complete(state) {
  return {
    ...state,
    chat: state.chat ?? true,
    health: { state: state.health?.state || "unknown", missing: state.health?.missing ?? [], degraded: state.health?.degraded ?? [] },
    rates: { bubble_share: null, ...state.rates },
    requests: state.requests ?? {},
    waiting: state.waiting ?? null,
    decode: (state.decode ?? []).map((one) => ({
      ...one,
      known: { running: Boolean(one.lengths), candidates: Boolean(one.candidates) },
      lengths: one.lengths ?? [],
      candidates: { batch: one.candidates?.batch ?? [], requests: one.candidates?.requests ?? [] },
      bubble_share: one.bubble_share ?? null,
    })),
    prefill: state.prefill ?? [],
    pool: state.pool ?? [],
    prefix_cache: state.prefix_cache ?? null,
    channels: state.channels ?? [],
    roles: state.roles ?? [],
    events: state.events ?? [],
    slowest: state.slowest ?? [],
  };
}

function take(state) {
  latest = complete(state);
  if (!latest.stale) remember(latest);  // its figures are those of the state before
  playground.offer(latest.chat);
  schedule();
}

function schedule() {
  if (scheduled || latest === null || document.hidden) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    draw(latest);
  });
}

function draw(state) {
  showSummary(state);
  showStatus();
  if (view !== "live") return;
  showLengths(state);
  showHistory();
  requests.show(state);
  showPool(state);
  showPrefill(state);
  showChannels(state);
  showEvents(state);
  showProcesses(state);
}

byId("decode-details").addEventListener("toggle", () => {
  if (latest !== null && byId("decode-details").open) showDecodeTable(latest.decode);
});
document.addEventListener("visibilitychange", schedule);

// ---- the feed

let status = "connecting";

function showStatus() {
  const lost = status === "disconnected";
  const stale = !lost && latest?.stale ? latest.stale : "";
  const shown = stale ? "stale" : status;
  const waitS = Math.max(0, Math.ceil((retryAtMs - Date.now()) / 1e3));
  setAttribute(byId("feed"), "data-state", shown);
  setText(byId("feed"), lost ? "disconnected" : shown);
  const since = latest === null ? "" : ` The figures are of ${clock(latest.now)}.`;
  const words = lost
    ? `${reason ? `Not shown: ${reason}` : "Disconnected"}, retrying${waitS > 0 ? ` in ${waitS} s` : ""}.${since}`
    : stale && `The figures are stale: ${stale}`;
  setText(byId("feed-banner"), words);
  setAttribute(byId("feed-banner"), "data-level", lost ? "error" : "warning");
  setHidden(byId("feed-banner"), !words);
  document.body.classList.toggle("old", Boolean(words));
}

new Feed(new URL("feed", HERE), take, (name, atMs, said) => {
  status = name;
  retryAtMs = atMs;
  reason = said;
  if (name !== "live") showStatus();
});
window.setInterval(() => {
  if (status !== "live" && !document.hidden) showStatus();
}, 1_000);

// ---- views

function show(name) {
  view = name;
  for (const one of VIEWS) {
    const tab = byId(`tab-${one}`);
    setHidden(byId(one), one !== name);
    setAttribute(tab, "aria-selected", one === name);
    tab.tabIndex = one === name ? 0 : -1;
  }
  if (name === "playground") playground.start();
  schedule();
}

/** The address names the view, or a request. */
function route() {
  const hash = window.location.hash.slice(1);
  if (hash.startsWith("request=")) {
    show("live");
    requests.open(decoded(hash.slice("request=".length)));
  } else if (VIEWS.includes(hash) || hash === "") show(hash || "live");
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function choose(name) {
  window.history.pushState(null, "", `#${name}`);
  show(name);
}

for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => choose(name));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const place = event.key === "Home" ? 0 : event.key === "End" ? VIEWS.length - 1 : step && VIEWS.indexOf(view) + step;
  if (place === undefined) return;
  event.preventDefault();
  const name = VIEWS[(place + VIEWS.length) % VIEWS.length];
  choose(name);
  byId(`tab-${name}`).focus();
});
window.addEventListener("hashchange", route);

byId("sign-out").hidden = !hasSignedIn();
byId("sign-out").addEventListener("click", async () => {
  await fetch(new URL("logout", HERE), { method: "POST", headers: { "content-type": "application/json" }, body: "{}" }).catch(() => {});
  rememberSignIn(false);
  window.location.reload();
});

route();
