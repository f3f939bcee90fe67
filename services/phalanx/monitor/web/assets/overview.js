// What one sees first: where the run stands, what happens right now and why, and its figures.

import { age, bytes, clock, compact, PARTS, percent, seconds, words } from "./format.js";

const byId = (id) => document.getElementById(id);
const ACTIVE = new Set(["queued", "preparing", "starting", "running", "recovering"]);
const SILENT_S = 30;
let saved = null;

export function showSummary({ summary, series, evaluations, attempts, ranks, events }) {
  const { state, step, num_steps: numSteps, saves } = summary;
  byId("state").textContent = words(state);
  byId("state").className = `state ${state}`;
  byId("progress").value = numSteps ? Math.min(1, step / numSteps) : 0;
  byId("steps").textContent = numSteps ? `step ${step} of ${numSteps} · ${Math.floor((100 * step) / numSteps)} %` : `step ${step}`;
  const stepTime = series.recent("step_time_s"), leftS = (numSteps - step) * stepTime;
  const hasLeft = state === "running" && step < numSteps && stepTime > 0;
  fillTiles({
    loss: [compact(summary.loss)],
    evaluation: [compact([...evaluations.values()].at(-1)), evaluations.size ? `at step ${[...evaluations.keys()].at(-1)}` : ""],
    speed: [compact(summary.tokens_per_second)],
    "step-time": [seconds(stepTime)],
    saved: [saves?.step ? `step ${saves.step}` : "–"],
    stall: [seconds(saves?.stall_s), saves?.num_skipped ? `${saves.num_skipped} skipped` : saves ? "none skipped" : ""],
    attempt: [summary.attempt || "–", attempts.at(-1)?.layout ?? ""],
    incidents: [summary.num_incidents],
    left: [hasLeft ? seconds(leftS) : "–", hasLeft ? `done at ${finish(leftS)}` : ""],
  });
  saved = saves?.step ? { ...saves, behind: step - saves.step, atMs: performance.now() - 1000 * saves.age_s } : null;
  showAge();
  showSplit(stepTime, series.recent("data_wait_s"), ranks);
  showNow(summary, events);
  document.title = titleOf(summary);
}

export function showNothing(title, text, isEmpty) {
  byId("state").textContent = title;
  byId("state").className = "state";
  byId("steps").textContent = "";
  byId("progress").value = 0;
  byId("now").textContent = text;
  byId("now").className = "now";
  byId("now").hidden = !text;
  byId("empty").hidden = !isEmpty;
  document.title = `${title} – Phalanx`;
}

export const titleOf = ({ state, step, num_steps: numSteps }) => `${words(state)} ${step}${numSteps ? `/${numSteps}` : ""} – Phalanx`;

function fillTiles(tiles) {
  for (const [name, [figure, more]] of Object.entries(tiles)) {
    byId(`tile-${name}`).textContent = figure;
    if (more === undefined) continue;
    byId(`more-${name}`).textContent = more;
    byId(`more-${name}`).title = more;
  }
}

// The newest checkpoint grows older also while nothing is told.
export function showAge() {
  const ageS = saved ? (performance.now() - saved.atMs) / 1000 : NaN;
  const told = Number.isFinite(ageS) ? `${age(ageS)} ago` : saved ? `${saved.behind} steps ago` : "";
  const text = [told, saved?.num_bytes ? bytes(saved.num_bytes) : ""].filter(Boolean).join(", ");
  byId("more-saved").textContent = text;
  byId("more-saved").title = saved ? [text, `${saved.behind} steps behind`, `attempt ${saved.attempt}`].join(", ") : "";
}

function finish(leftS) {
  const at = new Date(Date.now() + 1000 * leftS);
  const day = leftS > 18 * 3600 ? `${at.toLocaleDateString([], { weekday: "short", day: "numeric", month: "short" })} ` : "";
  return day + at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
}

// Where a step's time goes: as the ranks measured its parts; else waiting for data, the host's own work, and the rest,
// which is the device and the peers.
function showSplit(stepTime, dataWait, ranks) {
  const shares = sharesOf(ranks.map((rank) => rank.parts).filter(Boolean));
  const split = shares ? measured(shares) : guessed(stepTime, dataWait, ranks);
  byId("split").hidden = !split.text;
  for (const name of ["data", "host", "peers", "rest"]) byId(`split-${name}`).style.flexGrow = Number.isFinite(split[name]) ? split[name] : 0;
  byId("more-step-time").textContent = split.text;
  byId("more-step-time").title = split.more ?? split.text;
}

// The mean over ranks of each part's share of the wall time; null where nothing was measured.
function sharesOf(told) {
  const sums = Object.keys(PARTS).map((name) => [name, told.reduce((sum, parts) => sum + (parts[name] ?? 0), 0)]);
  const whole = sums.reduce((sum, [, value]) => sum + value, 0);
  return whole > 0 ? Object.fromEntries(sums.map(([name, value]) => [name, value / whole])) : null;
}

function measured(shares) {
  const host = shares.forward_s + shares.backward_s + shares.optimizer_s, peers = shares.communication_s, data = shares.data_wait_s;
  return {
    data, host, peers, rest: 1 - data - host - peers,
    text: `${percent(host)} computing, ${percent(peers)} communication, ${percent(data)} data`,
    more: Object.entries(PARTS).map(([name, word]) => `${percent(shares[name])} ${word}`).join(", "),
  };
}

function guessed(stepTime, dataWait, ranks) {
  const busy = ranks.map((rank) => rank.busy_s).filter(Number.isFinite).sort((a, b) => a - b);
  const data = Math.min(1, (dataWait ?? NaN) / stepTime);
  const host = Math.max(0, Math.min(1 - data, busy[busy.length >> 1] / stepTime - data));
  const rest = 1 - data - (host || 0);
  const text = Number.isFinite(host) ? `${percent(data)} data, ${percent(host)} host, ${percent(rest)} device and peers` : `${percent(data)} data`;
  return { data, host, peers: 0, rest, text: Number.isFinite(data) ? text : "" };
}

// What is going on where a run does not simply train, and why.
function showNow(summary, events) {
  const now = byId("now"), { state } = summary;
  const began = events.findLastIndex((event) => event.type === "running");
  const told = events.slice(began + 1).filter((event) => event.cause?.kind || event.message);
  const why = told.findLast((event) => event.cause?.kind) ?? told.at(-1);
  let text = "";
  if (state !== "running" && state !== "succeeded" && why) text = `${clock(why.time)}  ${sentence(why)}`;
  if (ACTIVE.has(state) && state !== "queued" && summary.silent_s > SILENT_S) text = `nothing heard of it for ${seconds(summary.silent_s)}. ${text}`;
  now.textContent = text;
  now.className = `now ${state}`;
  now.hidden = !text;
  byId("empty").hidden = true;
}

function sentence({ cause, step, message }) {
  if (!cause?.kind) return message;
  const place = [cause.rank == null ? "" : `rank ${cause.rank}`, cause.node_id ? `on ${cause.node_id}` : "", step ? `at step ${step}` : ""].filter(Boolean).join(" ");
  const what = [words(cause.kind), place].filter(Boolean).join(", ");
  return [`${what}: ${cause.message}`, message].filter(Boolean).join(" → ");
}
