// Where blocks are: the pool's shards, the candidate buffers, and what is copied between stores.
import { byId, fillTable, make, reconcile, setAttribute, setHidden, setStyle, setText } from "./dom.js";
import { NONE, bytes, compact, count, percent, rate, sum, total, whole } from "./format.js";

const MOST_CHANNELS = 200;

export function storeWords(store) {
  const parts = [`${whole(store.owned)} owned`, `${whole(store.cached)} cached`, `${whole(store.free)} free`];
  if (store.pinned) parts.push(`${whole(store.pinned)} pinned`);
  return `${parts.join(", ")} of ${whole(store.capacity)}`;
}

function makeStore() {
  return make(
    "div",
    { class: "store" },
    make("span", { class: "store-name" }),
    make("span", { class: "store-words" }),
    make("div", { class: "bar", role: "img" }, make("i", { class: "owned" }), make("i", { class: "cached" })),
  );
}

function updateStore(node, name, store) {
  const [title, words, bar] = node.children;
  const text = storeWords(store);
  setText(title, name);
  setText(words, text);
  setAttribute(bar, "aria-label", `${name}: ${text} blocks`);
  for (const part of bar.children) {
    setStyle(part, "width", `${((100 * (store[part.className] ?? 0)) / Math.max(1, store.capacity ?? 0)).toFixed(2)}%`);
  }
}

// ---- the pool

export function showPool(state) {
  const { pool, prefix_cache: cache } = state;
  const stores = pool.flatMap((shard) => [
    { name: shard.state === "ready" ? shard.id : `${shard.id} (${shard.state})`, key: shard.id, store: shard },
    ...(shard.disk ? [{ name: `${shard.id}, disk`, key: `${shard.id}/disk`, store: shard.disk }] : []),
  ]);
  reconcile(byId("pool"), stores, ({ key }) => key, () => make("li", {}, makeStore()), (node, { key, name, store }) => {
    setAttribute(node, "data-store", key);
    updateStore(node.firstElementChild, name, store);
  });
  setText(byId("pool-words"), poolWords(pool));
  setText(byId("prefix-cache"), cacheWords(cache));
}

function poolWords(pool) {
  if (pool.length === 0) return "There is no shard.";
  const [free, capacity] = [total(pool.map((shard) => shard.free)), total(pool.map((shard) => shard.capacity))];
  return `${count(pool.length, "shard")}; ${whole(free)} of ${count(capacity, "block")} free (${percent(capacity && free !== null ? free / capacity : null)}).`;
}

function cacheWords(cache) {
  if (cache === null) return "The prefix cache is off.";
  const asked = `${rate(cache.queried_tokens_per_s, "tokens")} looked up`;
  if (cache.hit_share === null) return `Prefix cache: ${asked}.`;
  const disk = cache.disk_hit_share ? `, ${percent(cache.disk_hit_share)} on disk` : "";
  return `Prefix cache: ${asked}, ${percent(cache.hit_share)} found${disk}.`;
}

// ---- prefill instances

export function showPrefill({ prefill }) {
  const pending = total(prefill.map((one) => one.pending_tokens));
  setText(byId("prefill-words"), prefill.length === 0 ? "There is no prefill instance." : `${count(pending, "token")} of prompts ${pending === 1 ? "is" : "are"} still to be computed.`);
  reconcile(byId("prefill"), prefill, (one) => one.id, makePrefill, updatePrefill);
}

function makePrefill(one) {
  const head = make("p", {}, make("strong"), make("span", { class: "chip state" }), make("span", { class: "muted" }));
  head.firstElementChild.textContent = one.id;
  const meter = make("div", { class: "bar busy", role: "img" }, make("i"));
  return make("li", { "data-prefill": one.id }, head, meter, make("div"));
}

function updatePrefill(node, one) {
  const [head, meter, buffers] = node.children;
  setAttribute(node, "data-pending", one.pending_tokens);
  setText(head.children[1], one.state);
  setHidden(head.children[1], one.state === "ready");
  setText(head.children[2], [` ${count(one.pending_tokens, "token")} pending`, rate(one.passes_per_s, "passes"), `busy ${percent(one.busy_share)}`].join(" · "));
  setAttribute(meter, "aria-label", `${one.id} is busy ${percent(one.busy_share)} of the time`);
  setStyle(meter.firstElementChild, "width", `${Math.min(100, 100 * (one.busy_share ?? 0)).toFixed(1)}%`);
  reconcile(buffers, one.buffers ?? [], ({ store }) => store, makeStore, (buffer, store) => {
    setAttribute(buffer, "data-store", store.store);
    updateStore(buffer, store.store.replace(`${one.id}/`, ""), store);
  });
}

// ---- channels

export function showChannels({ channels }) {
  const all = channels.toSorted((one, other) => (other.bytes_per_s ?? 0) - (one.bytes_per_s ?? 0) || keyOf(one).localeCompare(keyOf(other)));
  const shown = all.slice(0, MOST_CHANNELS);
  const hidden = all.length - shown.length;
  const copied = sum(all.map((one) => one.bytes_per_s));
  setText(byId("channels-words"), all.length === 0 ? "nothing was copied in the last ten seconds" : `${bytes(copied)}/s in all${hidden ? `; ${hidden} slower ones are not shown` : ""}`);
  fillTable(byId("channels"), shown, keyOf, ["", "", "", "n", "n", "n"], (one) => [
    one.source,
    one.destination,
    one.channel,
    one.bytes_per_s === null ? NONE : `${bytes(one.bytes_per_s)}/s`,
    one.copies_per_s === null ? NONE : `${compact(one.copies_per_s)}/s`,
    percent(one.busy_share),
  ], (row, one) => setAttribute(row, "data-bytes", one.bytes_per_s));
}

const keyOf = ({ source, destination, channel }) => `${source} ${destination} ${channel}`;
