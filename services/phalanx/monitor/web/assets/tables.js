// Rows of text, changed where they differ. Text only: nothing that a run says becomes markup.

import { bytes, clock, compact, NARROW, PARTS, percent, seconds, words } from "./format.js";

const MAX_ROWS = 500;

// onStep is called with the step of the incident that somebody wants to look at.
export function fillIncidents(table, incidents, onStep) {
  rows(table, incidents.toReversed().map(({ step, cause, action, outcome }) => ({
    cells: [step || "–", words(cause?.kind), who(cause), cause?.message ?? "", words(action), outcome],
    act: step ? () => onStep(step) : null,
  })));
}

// Those with something wrong come first.
export function fillRanks(table, ranks) {
  const isBad = (rank) => !rank.alive || Boolean(rank.note);
  rows(table, [...ranks.filter(isBad), ...ranks.filter((rank) => !isBad(rank))].map((rank) => ({
    bad: isBad(rank),
    cells: [rank.rank, rank.node_id, words(rank.phase), rank.step, seconds(rank.in_phase_s), seconds(rank.busy_s), ...timeOf(rank.parts), rank.note || (rank.alive ? "" : "gone")],
  })));
}

// Where the wall time of the last measured step went: computing, waiting for peers, and what else is worth a look.
function timeOf(parts) {
  if (!parts) return ["–", "–", "–"];
  const whole = Object.keys(PARTS).reduce((sum, name) => sum + (parts[name] ?? 0), 0);
  const share = (...names) => percent(names.reduce((sum, name) => sum + (parts[name] ?? 0), 0) / whole);
  return [share("forward_s", "backward_s", "optimizer_s"), share("communication_s"), share("data_wait_s", "checkpoint_s", "evaluation_s", "rest_s")];
}

export function fillGpus(table, gpus) {
  rows(table, gpus.map((gpu) => ({
    bad: gpu.xid || gpu.ecc_uncorrectable,
    cells: [
      gpu.node, gpu.index, gpu.name, percent(gpu.utilization),
      `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`,
      unit(gpu.temperature_c, "°C"), unit(gpu.power_w, "W"), unit(gpu.sm_clock_mhz, "MHz"),
      [gpu.xid ? `XID ${gpu.xid}` : "", gpu.ecc_uncorrectable ? `${gpu.ecc_uncorrectable} ECC` : ""].filter(Boolean).join(", ") || "none",
      `${seconds(gpu.age_s)} ago`,
    ],
  })));
}

export function fillEvents(list, events) {
  list.replaceChildren(...events.slice(-MAX_ROWS).toReversed().map((event) => {
    const item = document.createElement("li");
    item.className = event.type;
    const [time, what, message] = ["time", "b", "span"].map((name) => document.createElement(name));
    time.textContent = clock(event.time);
    time.dateTime = event.time ?? "";
    time.title = event.time ?? "";
    what.textContent = words(event.type);
    const where = [event.attempt ? `attempt ${event.attempt}` : "", event.step ? `step ${event.step}` : "", event.actor ? `by ${event.actor}` : ""].filter(Boolean).join(", ");
    message.textContent = [where, event.cause ? `${words(event.cause.kind)}: ${event.cause.message}` : "", event.message].filter(Boolean).join(" · ");
    item.append(time, what, message);
    return item;
  }));
}

const unit = (value, name) => (value == null ? "–" : `${compact(Math.round(value))}${NARROW}${name}`);

function who(cause) {
  return [cause?.rank == null ? "" : `rank ${cause.rank}`, cause?.node_id].filter(Boolean).join(", ") || "–";
}

function rows(table, values) {
  const body = table.tBodies[0], shown = values.slice(0, MAX_ROWS);
  while (body.rows.length > shown.length) body.deleteRow(-1);
  shown.forEach(({ bad, cells, act }, i) => {
    const row = body.rows[i] ?? body.insertRow();
    row.className = bad ? "bad" : "";
    cells.forEach((text, j) => put(row.cells[j] ?? row.insertCell(), String(text ?? ""), j === 0 ? act : null));
  });
  table.caption.textContent = values.length > shown.length ? `${shown.length} of ${values.length}` : values.length ? "" : "none";
}

// The text of a cell; on a button where it leads somewhere.
function put(cell, text, act) {
  if (cell.textContent !== text || Boolean(act) !== (cell.firstElementChild !== null)) {
    cell.textContent = act ? "" : text;
    if (act) cell.append(Object.assign(document.createElement("button"), { type: "button", textContent: text, title: "show it in the charts" }));
  }
  if (act) cell.firstElementChild.onclick = act;
}
