// Charts that only some runs have: of experts, of float16's loss scale, and one of each metric of the job's own.

import { Chart } from "./chart.js";
import { Heat } from "./heat.js";
import { Series } from "./series.js";

const MAX_METRICS = 16;
const SOMETIMES = [
  ["experts", [["expert_worst", "--warn"], ["expert_mean", "--train"]]],
  ["idle", [["expert_idle", "--train"]]],
  ["balance", [["balance_loss", "--train"]]],
  ["scale", [["loss_scale", "--train"]]],
];

export class Further {
  constructor(byId, span) {
    Object.assign(this, { span, metrics: new Map(), before: byId("heat"), overflows: byId("overflows"), heat: new Heat(byId("heat")) });
    this.sometimes = SOMETIMES.map(([name, lines]) => {
      return { section: byId(name), chart: new Chart(byId(name), span, lines), columns: lines.map(([column]) => column) };
    });
    this.charts = this.sometimes.map(({ chart }) => chart);
  }

  show(run) {
    for (const { section, columns } of this.sometimes) section.hidden = !columns.some((name) => run.series.has(name));
    this.heat.show(run.heat);
    this.showOverflows(run.series);
    this.showMetrics(run);
  }

  // Steps of which no more is wrong than that gradients overflowed in float16.
  showOverflows(series) {
    const { columns, length } = series;
    let count = 0;
    if (!series.has("loss_scale")) return;
    for (let i = 0; i < length; i++) count += columns.loss_scale[i] > 1 && Number.isFinite(columns.loss[i]) && !Number.isFinite(columns.gradient_norm[i]);
    this.overflows.textContent = count ? `${count} ${count === 1 ? "update" : "updates"} left out` : "";
  }

  // One chart a name, in the order of the names; those of another run go.
  showMetrics({ evaluations, metrics, series, marks, bands }) {
    const names = [...metrics.keys()].sort().slice(0, MAX_METRICS);
    for (const [name, chart] of this.metrics) if (!names.includes(name)) { this.metrics.delete(name); chart.close(); }
    const steps = [...evaluations.keys()].sort((a, b) => a - b);
    for (const name of names) {
      if (!this.metrics.has(name)) this.metrics.set(name, this.chartOf(name));
      const chart = this.metrics.get(name), values = metrics.get(name);
      chart.take(steps, steps.map((step) => values.get(step) ?? NaN), series);
      Object.assign(chart, { marks, bands }).touch();
    }
  }

  chartOf(name) {
    const section = document.createElement("section"), head = document.createElement("div"), title = document.createElement("h2");
    Object.assign(section, { className: "figure metric" });
    head.className = "head";
    title.textContent = name;
    const canvas = Object.assign(document.createElement("canvas"), { tabIndex: 0 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${name} on held-out data over steps`);
    head.append(title, document.createElement("output"));
    section.append(head, canvas);
    this.before.before(section);
    return new MetricChart(section, this.span);
  }
}

// A chart over the steps of the whole run with points where it was evaluated.
class MetricChart extends Chart {
  constructor(section, span) {
    super(section, span, [["value", "--train"]]);
    Object.assign(this, { section, key: "" });
  }

  take(steps, values, whole) {
    this.run = whole;
    const key = JSON.stringify([steps, values]);
    if (key === this.key) return;
    this.key = key;
    this.series = new Series(["step", "value", "attempt"]);
    this.series.append({ step: steps, value: values });
    this.dots = steps.map((step, i) => ({ step, value: values[i], label: "" }));
  }

  get whole() { return this.run?.length ? [this.run.step[0], Math.max(1, this.run.last("step"))] : super.whole; }

  close() {
    this.leave();
    this.watch.disconnect();
    this.span.charts.splice(this.span.charts.indexOf(this), 1);
    this.section.remove();
  }
}
