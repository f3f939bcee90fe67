// The page: one run at a time, first as it stands, then what is new.

import { ask, follow } from "./api.js";
import { Chart, Span } from "./chart.js";
import { compact, seconds, words } from "./format.js";
import { drawLineage } from "./lineage.js";
import { Series } from "./series.js";
import { fillEvents, fillGpus, fillIncidents, fillRanks } from "./tables.js";

const RUNS_EVERY_MS = 3000, GPUS_EVERY_MS = 5000;
const byId = (id) => document.getElementById(id);

const span = new Span();
const lossChart = new Chart(byId("loss"), "loss", span, "--train");
const charts = [
  lossChart,
  new Chart(byId("speed"), "tokens_per_second", span, "--train"),
  new Chart(byId("norm"), "gradient_norm", span, "--train"),
];

class RunView {
  constructor(job) {
    Object.assign(this, { job, series: new Series(), incidents: new Map(), events: new Map(), evaluations: new Map(), attempts: [] });
    for (const chart of charts) chart.series = this.series;
    lossChart.dots = [];
    span.show(null);
  }

  async open() {
    const run = await ask("run", { job: this.job });
    if (this.closed) return;
    this.take(run);
    this.close_ = follow(this.job, run.version, (change) => this.take(change), showLink);
  }

  close() { this.closed = true; this.close_?.(); }

  take(change) {
    this.series.append(change.curve);
    for (const each of change.incidents ?? []) this.incidents.set(each.id, each);
    for (const each of change.events ?? []) this.events.set(each.revision, each);
    for (const each of change.evaluations ?? []) this.evaluations.set(each.step, each.loss ?? NaN);
    if (change.attempts?.length) this.attempts = change.attempts;
    this.summary = change.summary;
    this.ranks = change.ranks ?? [];
    this.pending ??= requestAnimationFrame(() => { this.pending = null; if (!this.closed) this.show(); });
  }

  show() {
    const incidents = [...this.incidents.values()];
    showSummary(this.summary, this.series, this.evaluations);
    fillIncidents(byId("incidents"), incidents);
    fillEvents(byId("events"), [...this.events.values()]);
    fillRanks(byId("ranks"), this.ranks);
    drawLineage(byId("lineage"), this.attempts);
    lossChart.dots = [...this.evaluations].map(([step, value]) => ({ step, value }));
    const marks = [
      ...this.attempts.slice(1).map((each) => ({ step: each.parent_step, color: "--attempt", label: `attempt ${each.attempt}` })),
      ...incidents.filter((each) => each.step).map((each) => ({ step: each.step, color: "--incident", label: `${words(each.cause?.kind)}: ${each.cause?.message ?? ""}` })),
    ];
    for (const chart of charts) { chart.marks = marks; chart.touch(); }
  }
}

function showSummary(summary, series, evaluations) {
  const state = byId("state");
  state.textContent = words(summary.state);
  state.className = `state ${summary.state}`;
  byId("progress").value = summary.num_steps ? summary.step / summary.num_steps : 0;
  byId("steps").textContent = `step ${summary.step} of ${summary.num_steps || "?"}`;
  const stepTime = series.last("step_time_s"), wait = series.last("data_wait_s");
  const tiles = {
    loss: compact(summary.loss),
    evaluation: compact([...evaluations.values()].at(-1)),
    speed: compact(summary.tokens_per_second),
    "step-time": seconds(stepTime),
    wait: stepTime > 0 ? `${((100 * wait) / stepTime).toFixed(1)} %` : "–",
    attempt: summary.attempt || "–",
    incidents: summary.num_incidents,
    left: summary.state === "running" && stepTime > 0 ? seconds((summary.num_steps - summary.step) * stepTime) : "–",
  };
  for (const [name, text] of Object.entries(tiles)) byId(`tile-${name}`).textContent = text;
  document.title = `${words(summary.state)} ${summary.step}/${summary.num_steps} – Phalanx`;
}

function showLink(stands) {
  const link = byId("link");
  link.textContent = stands ? "live" : "the monitor does not answer; trying again";
  link.classList.toggle("lost", !stands);
}

let view = null;

function choose(job) {
  view?.close();
  view = new RunView(job);
  history.replaceState(null, "", `#${encodeURIComponent(job)}`);
  const opened = view;
  opened.open().catch((error) => {
    showLink(false);
    byId("link").title = error.message;
    setTimeout(() => { if (view === opened) choose(job); }, RUNS_EVERY_MS);
  });
}

async function refreshRuns() {
  const { runs } = await ask("runs");
  const select = byId("runs");
  const names = runs.map((run) => run.job);
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    const chosen = view?.job ?? decodeURIComponent(location.hash.slice(1));
    select.replaceChildren(...names.map((name) => new Option(name.replace(/^projects\/(.*)\/jobs\//, "$1 / "), name)));
    if (names.includes(chosen)) select.value = chosen;
  }
  if (!view && names.length) choose(select.value);
}

async function refreshGpus() {
  const { gpus, sources } = await ask("gpus");
  byId("gpu-sources").textContent = sources.join("; ") || "no source of GPU figures";
  fillGpus(byId("gpus"), gpus);
}

// Asks again and again, also after a failure.
async function every(periodMs, action) {
  for (;;) {
    try { await action(); } catch { showLink(false); }
    await new Promise((resolve) => setTimeout(resolve, periodMs));
  }
}

byId("runs").addEventListener("change", (event) => choose(event.target.value));
byId("reset").addEventListener("click", () => span.show(null));
byId("log").addEventListener("change", (event) => { lossChart.log = event.target.checked; lossChart.touch(); });
byId("smoothing").addEventListener("input", (event) => { for (const chart of charts) { chart.weight = Number(event.target.value); chart.touch(); } });
every(RUNS_EVERY_MS, refreshRuns);
every(GPUS_EVERY_MS, refreshGpus);
globalThis.phalanx = { charts, span, get view() { return view; } };
