// The page: a run that is chosen, the list of runs, and the GPUs.

import { ask } from "./api.js";
import { Chart, Span } from "./chart.js";
import { shortName, words } from "./format.js";
import { Further } from "./further.js";
import { drawLineage } from "./lineage.js";
import { showAge, showNothing, showSummary, titleOf } from "./overview.js";
import { Run } from "./run.js";
import { fillEvents, fillGpus, fillIncidents, fillRanks } from "./tables.js";

const RUNS_EVERY_MS = 3000, GPUS_EVERY_MS = 5000, INCIDENT_STEPS = 50;
const byId = (id) => document.getElementById(id);

const span = new Span();
const charts = [
  new Chart(byId("loss"), span, [["loss", "--train"]]),
  new Chart(byId("speed"), span, [["tokens_per_second", "--train"]]),
  new Chart(byId("norm"), span, [["gradient_norm", "--train"]]),
  new Chart(byId("time"), span, [["step_time_s", "--train"], ["data_wait_s", "--warn"]]),
  new Chart(byId("rate"), span, [["learning_rate", "--train"]]),
];
const lossChart = charts[0], further = new Further(byId, span), stepCharts = [...charts, ...further.charts];
let run = null, wanted = hashJob(), drawn = null;

function show(shown) {
  showSummary(shown);
  fillRanks(byId("ranks"), shown.ranks);
  if (shown.hasNews) {
    shown.hasNews = false;
    fillIncidents(byId("incidents"), [...shown.incidents.values()], (step) => span.show([Math.max(0, step - INCIDENT_STEPS), step + INCIDENT_STEPS]));
    fillEvents(byId("events"), shown.events);
  }
  if (drawn !== shown.attempts) drawLineage(byId("lineage"), (drawn = shown.attempts));
  lossChart.dots = shown.dots;
  further.show(shown);
  const { series, marks, bands } = shown;
  for (const chart of stepCharts) Object.assign(chart, { series, marks, bands }).touch();
}

function showLink(stands, error) {
  const link = byId("link");
  const text = stands ? "live" : error?.status ? error.message : "the monitor does not answer; trying again";
  if (link.textContent !== text) link.textContent = text;
  link.className = stands ? "link" : "link lost";
}

function hashJob() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

function choose(job) {
  run?.close();
  span.range = span.cursor = null;
  byId("runs").value = wanted = job;
  history.replaceState(null, "", `#${encodeURI(job)}`);
  run = new Run(job, show, showLink);
  run.hasNews = true;
  run.open();
}

async function refreshRuns() {
  const { runs } = await ask("runs");
  const select = byId("runs"), names = runs.map((each) => each.job);
  fillSelect(select, runs);
  if (!run && wanted && !names.includes(wanted)) showNothing("unknown run", `No run named ${wanted} was heard of yet; it is shown as soon as it is.`, false);
  else if (!run && names.length) choose(wanted || names[0]);
  else if (!run) showNothing("no run yet", "", true);
  select.value = run?.job ?? "";
  const own = runs.find((each) => each.job === run?.job);
  if (own && document.hidden) document.title = titleOf(own);
  if (document.hidden) return;
  if (!run) showLink(true);
}

function fillSelect(select, runs) {
  const texts = runs.map((each) => `${shortName(each.job)} – ${words(each.state)}`);
  if (texts.join("\n") === [...select.options].map((option) => option.text).join("\n")) return;
  select.replaceChildren(...runs.map((each, i) => new Option(texts[i], each.job)));
}

async function refreshGpus() {
  if (document.hidden) return;
  const { gpus, sources } = await ask("gpus");
  byId("gpu-sources").textContent = sources.join("; ") || "no source of GPU figures";
  fillGpus(byId("gpus"), gpus);
}

// Asks again and again, also after a failure.
async function every(periodMs, action) {
  for (;;) {
    try { await action(); } catch (error) { showLink(false, error); }
    await new Promise((resolve) => setTimeout(resolve, periodMs));
  }
}

byId("runs").addEventListener("change", (event) => choose(event.target.value));
byId("reset").addEventListener("click", () => span.show(null));
byId("log").addEventListener("change", (event) => { lossChart.isLog = event.target.checked; lossChart.touch(); });
byId("smoothing").addEventListener("input", (event) => { for (const chart of stepCharts) { chart.weight = Number(event.target.value); chart.touch(); } });
addEventListener("hashchange", () => { if (hashJob() && hashJob() !== run?.job) choose(hashJob()); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { span.touch(); further.heat.draw(); });
// A browser allows few connections to one host: a page that nobody sees holds none.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) run?.pause();
  else if (run?.summary) run.resume();
  else run?.open();
});
setInterval(showAge, 1000);
every(RUNS_EVERY_MS, refreshRuns);
every(GPUS_EVERY_MS, refreshGpus);
globalThis.phalanx = { charts, further, span, get run() { return run; } };
