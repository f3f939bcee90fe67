// Rows of text, replaced as a whole where they are few. Text only: nothing that a run says becomes markup.

import { bytes, clock, compact, seconds, words } from "./format.js";

export function fillIncidents(table, incidents) {
  rows(table, incidents.toReversed().map(({ step, cause, action, outcome }) => ({
    cells: [step || "–", words(cause?.kind), who(cause), cause?.message ?? "", words(action), outcome],
  })));
}

export function fillRanks(table, ranks) {
  rows(table, ranks.map((rank) => ({
    bad: !rank.alive || rank.note,
    cells: [rank.rank, rank.node_id, words(rank.phase), rank.step, seconds(rank.in_phase_s), seconds(rank.busy_s), rank.alive ? rank.note : rank.note || "gone"],
  })));
}

export function fillGpus(table, gpus) {
  rows(table, gpus.map((gpu) => ({
    bad: gpu.xid || gpu.ecc_uncorrectable,
    cells: [
      gpu.node, gpu.index, gpu.name,
      gpu.utilization == null ? "–" : `${Math.round(100 * gpu.utilization)} %`,
      `${bytes(gpu.memory_used_bytes)} of ${bytes(gpu.memory_total_bytes)}`,
      gpu.temperature_c == null ? "–" : `${Math.round(gpu.temperature_c)} °C`,
      gpu.power_w == null ? "–" : `${Math.round(gpu.power_w)} W`,
      gpu.sm_clock_mhz == null ? "–" : `${compact(gpu.sm_clock_mhz)} MHz`,
      [gpu.xid ? `XID ${gpu.xid}` : "", gpu.ecc_uncorrectable ? `${gpu.ecc_uncorrectable} ECC` : ""].filter(Boolean).join(", ") || "none",
    ],
  })));
}

export function fillEvents(list, events) {
  list.replaceChildren(...events.toReversed().map((event) => {
    const item = document.createElement("li");
    item.className = event.type;
    const [time, what, message] = ["time", "b", "span"].map((name) => document.createElement(name));
    time.textContent = clock(event.time);
    what.textContent = words(event.type);
    message.textContent = [event.message, event.cause?.message].filter(Boolean).join(": ");
    item.append(time, what, message);
    return item;
  }));
}

function who(cause) {
  return [cause?.rank == null ? "" : `rank ${cause.rank}`, cause?.node_id].filter(Boolean).join(", ") || "–";
}

function rows(table, values) {
  table.tBodies[0].replaceChildren(...values.map(({ bad, cells }) => {
    const row = document.createElement("tr");
    if (bad) row.className = "bad";
    for (const text of cells) row.insertCell().textContent = text;
    return row;
  }));
}
