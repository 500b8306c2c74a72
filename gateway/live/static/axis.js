// The axis of prefix lengths that the histogram and all batches share: a log scale between powers of four.
import { span } from "./format.js";

const KEEP_MS = 60_000;  // the axis does not shrink sooner, so that it does not jump
const LEAST_STEPS = 3;

const power = (length) => Math.log(Math.max(1, length)) / Math.log(4);

export class LengthAxis {
  constructor() {
    this.low = 2;  // as powers of four
    this.high = 6;
    this.seen = [];
  }

  /** Makes room for what a state shows. */
  follow(state, nowMs) {
    const ends = [];
    for (const [first, last] of state.waiting ?? []) ends.push(first, last);
    for (const { lengths, candidates } of state.decode) {
      for (const some of [lengths, candidates.batch, candidates.requests]) ends.push(...(span(some) ?? []));
    }
    const found = span(ends);
    if (found !== null) {
      const low = Math.floor(power(found[0]) + 1e-9);
      this.seen.push([nowMs, low, Math.max(low + LEAST_STEPS, Math.ceil(power(found[1] + 1) - 1e-9))]);
    }
    this.seen = this.seen.filter(([atMs]) => atMs > nowMs - KEEP_MS);
    if (this.seen.length === 0) return;
    this.low = Math.min(...this.seen.map(([, low]) => low));
    this.high = Math.max(...this.seen.map(([, , high]) => high));
  }

  /** From 0 to 1000, the width of every plot's view box. */
  at(length) {
    const share = (power(length) - this.low) / (this.high - this.low);
    return 1000 * Math.min(1, Math.max(0, share));
  }

  /** [position, length] of each power of four. */
  ticks() {
    const all = [];
    for (let step = this.low; step <= this.high; step += 1) all.push([this.at(4 ** step), 4 ** step]);
    return all;
  }

  /** Lines at the ticks, as the path of a plot that is 100 high. */
  grid() {
    return this.ticks().map(([x]) => `M${x.toFixed(1)} 0v100`).join("");
  }
}
