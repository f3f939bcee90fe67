// The steps of a run as columns that grow; a step that is done again replaces what was there from it on.

const COLUMNS = [
  "step", "loss", "tokens_per_second", "gradient_norm", "step_time_s", "data_wait_s", "learning_rate", "attempt",
  "expert_worst", "expert_mean", "expert_idle", "balance_loss", "loss_scale",
];

export class Series {
  constructor(names = COLUMNS) {
    this.length = this.version = 0;
    this.names = names;
    this.columns = Object.fromEntries(names.map((name) => [name, new Float64Array(1024)]));
    this.told = new Set();
  }

  get step() { return this.columns.step; }

  // Whether a column was ever told, which those are not that only some runs have.
  has(name) { return this.told.has(name); }

  last(name) { return this.length ? this.columns[name][this.length - 1] : null; }

  // The median of the last finite values; null where there are none.
  recent(name, count = 20) {
    const values = this.columns[name].slice(Math.max(0, this.length - count), this.length).filter(Number.isFinite).sort();
    return values.length ? values[values.length >> 1] : null;
  }

  // Returns the first step that another attempt had done before; null for none.
  append(curve) {
    const count = curve?.step?.length ?? 0;
    if (!count) return null;
    const at = this.indexOf(curve.step[0]);
    const redone = at < this.length && this.columns.attempt[at] !== curve.attempt?.[0] ? this.step[at] : null;
    this.length = at;
    this.reserve(at + count);
    for (const name of this.names) {
      const column = this.columns[name], values = curve[name] ?? [];
      if (values.length) this.told.add(name);
      for (let i = 0; i < count; i++) column[at + i] = values[i] ?? NaN;
    }
    this.length += count;
    this.version += 1;
    return redone;
  }

  // Drops what is behind a step; whether there was anything.
  cut(step) {
    const length = this.indexOf(step + 1);
    if (length === this.length) return false;
    this.length = length;
    this.version += 1;
    return true;
  }

  // The first place whose step is at least `step`.
  indexOf(step) {
    let low = 0, high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.step[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  reserve(length) {
    if (length <= this.step.length) return;
    for (const name of this.names) {
      const wider = new Float64Array(Math.max(length, 2 * this.columns[name].length));
      wider.set(this.columns[name].subarray(0, this.length));
      this.columns[name] = wider;
    }
  }
}

// An exponential average over the finite values; what is not finite stays so. Weight 0 gives the values themselves.
export function smoothed(values, length, weight) {
  if (!weight) return values;
  const out = new Float64Array(length).fill(NaN);
  let average = NaN;
  for (let i = 0; i < length; i++) {
    const value = values[i];
    if (!Number.isFinite(value)) continue;
    average = Number.isFinite(average) ? weight * average + (1 - weight) * value : value;
    out[i] = average;
  }
  return out;
}

// One point for each pixel column with a value: where the line enters it, its least and greatest value, where it leaves,
// and whether a value that is not finite came before, so that the line has a gap there. One pass, and no spike is lost.
export function decimated(steps, values, first, end, toX, isLog) {
  const points = [];
  let point = null, gap = true;
  for (let i = first; i < end; i++) {
    const value = values[i];
    if (!Number.isFinite(value) || (isLog && value <= 0)) { gap = true; continue; }
    const x = Math.round(toX.offset + steps[i] * toX.factor);
    if (point === null || gap || x !== point.x) points.push((point = { x, enter: value, low: value, high: value, leave: value, gap }));
    else {
      if (value < point.low) point.low = value;
      if (value > point.high) point.high = value;
      point.leave = value;
    }
    gap = false;
  }
  return points;
}
