// The steps of a run as columns that grow; a step that is done again replaces what was there from it on.

const COLUMNS = ["step", "loss", "tokens_per_second", "gradient_norm", "step_time_s", "data_wait_s", "learning_rate", "attempt"];

export class Series {
  constructor() {
    this.length = 0;
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, new Float64Array(1024)]));
  }

  get step() { return this.columns.step; }

  last(name) { return this.length ? this.columns[name][this.length - 1] : null; }

  append(curve) {
    const count = curve?.step?.length ?? 0;
    if (!count) return;
    this.length = this.indexOf(curve.step[0]);
    this.reserve(this.length + count);
    for (const name of COLUMNS) {
      const column = this.columns[name];
      const values = curve[name] ?? [];
      for (let i = 0; i < count; i++) column[this.length + i] = values[i] ?? NaN;
    }
    this.length += count;
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
    const held = this.step.length;
    if (length <= held) return;
    for (const name of COLUMNS) {
      const wider = new Float64Array(Math.max(length, 2 * held));
      wider.set(this.columns[name].subarray(0, this.length));
      this.columns[name] = wider;
    }
  }
}

// An exponential average that skips what is not finite; weight 0 gives the values themselves.
export function smoothed(values, length, weight) {
  if (!weight) return values;
  const out = new Float64Array(length);
  let average = NaN;
  for (let i = 0; i < length; i++) {
    const value = values[i];
    if (Number.isFinite(value)) average = Number.isFinite(average) ? weight * average + (1 - weight) * value : value;
    out[i] = average;
  }
  return out;
}
