// Numbers and times for people.
export const NONE = "–";

const STEPS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Two or three digits, without trailing zeros: 0.053, 3.1, 45.2, 812. */
function digits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return String(Math.round(value));
  return String(Number(value.toFixed(size >= 0.995 ? 1 : size >= 0.0995 ? 2 : 3)));
}

/** 1.2 k, 3.4 M. */
export function compact(value, unit = "") {
  if (!known(value)) return NONE;
  for (const [step, name] of STEPS) {
    if (Math.abs(value) >= 0.9995 * step) return `${digits(value / step)} ${name}${unit}`;
  }
  return unit ? `${digits(value)} ${unit}` : digits(value);
}

/** A whole number with its digits grouped; compact from a million on. */
export function whole(value) {
  if (!known(value)) return NONE;
  return Math.abs(value) < 1e6 ? Math.round(value).toLocaleString("en-US") : compact(value);
}

export function count(value, thing) {
  return `${whole(value)} ${thing}${value === 1 ? "" : "s"}`;
}

export const rate = (value, thing) => (known(value) ? `${compact(value)} ${thing}/s` : NONE);

export const bytes = (value) => compact(value, "B");

/** 0.4 ms, 17 ms, 1.23 s, 2 min 5 s, 3 h 2 min, 4 d 1 h. */
export function seconds(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.00995) return `${Number((1e3 * value).toFixed(1))} ms`;
  if (size < 0.9995) return `${Math.round(1e3 * value)} ms`;
  if (size < 9.995) return `${value.toFixed(2)} s`;
  if (size < 59.95) return `${value.toFixed(1)} s`;
  const all = Math.round(value);
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86_400) return `${Math.floor(all / 3600)} h ${Math.floor(all / 60) % 60} min`;
  return `${Math.floor(all / 86_400)} d ${Math.floor(all / 3600) % 24} h`;
}

/** 6 %, 0.4 %. */
export function percent(share) {
  if (!known(share)) return NONE;
  const value = 100 * share;
  return `${Math.abs(value) < 9.95 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}

const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const clock = (unixS) => (known(unixS) ? CLOCK.format(1e3 * unixS) : NONE);

export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

/** Their sum; null if none is known. */
export const total = (values) => (values.some(known) ? sum(values) : null);

/** [shortest, longest] of some lengths; null without any. */
export function span(lengths) {
  if (!lengths?.length) return null;
  let [low, high] = [lengths[0], lengths[0]];
  for (const length of lengths) {
    if (length < low) low = length;
    if (length > high) high = length;
  }
  return [low, high];
}

export function range(lengths) {
  const found = span(lengths);
  if (found === null) return NONE;
  return found[0] === found[1] ? whole(found[0]) : `${whole(found[0])}–${whole(found[1])}`;
}

export const STAGES = {
  queue: "queue",
  prefill: "prefill",
  pool: "pool",
  prefetch: "prefetch",
  handover: "hand-over",
  decode: "decode",
};

const UNTOLD = {
  until_first_token: "queue or prefill",  // it ended before a worker had told of it
  not_noted: "later steps, not noted",
};

export const stageName = (stage) => STAGES[stage] ?? UNTOLD[stage] ?? stage;
