// Attempts as rows over steps: from the parent's step to the last one, a dot for each checkpoint, an arc from the parent.
// What a later attempt did again is drawn as abandoned.

import { compact } from "./format.js";

const ROW = 40, LEFT = 150, WIDTH = 620, RIGHT = 60, LEAST_PX = 9;

export function drawLineage(svg, attempts) {
  const last = Math.max(1, ...attempts.map((each) => Math.max(each.last_step, each.parent_step)));
  const x = (step) => LEFT + (step / last) * (WIDTH - LEFT - RIGHT);
  const row = new Map(attempts.map((each, i) => [each.attempt, 18 + i * ROW]));
  const leftAt = new Map(attempts.filter((each) => each.live).map((each) => [each.parent_attempt, each.parent_step]));
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(1, attempts.length) * ROW + 4}`);
  svg.setAttribute("aria-label", attempts.map(sentence).join("; ") || "no attempt yet");
  svg.replaceChildren();
  for (const each of attempts) {
    const y = row.get(each.attempt), from = x(each.parent_step), end = x(Math.max(each.last_step, each.parent_step));
    const kept = each.live ? Math.min(end, x(leftAt.get(each.attempt) ?? Infinity)) : from;
    if (row.has(each.parent_attempt)) {
      const above = row.get(each.parent_attempt);
      add(svg, "path", { d: `M ${from} ${above} C ${from} ${(above + y) / 2}, ${from} ${(above + y) / 2}, ${from} ${y}`, class: "parent" });
    }
    add(svg, "text", { x: 0, y: y + 1, class: "name" }, `attempt ${each.attempt}`);
    add(svg, "text", { x: 0, y: y + 15 }, each.layout);
    if (kept < end) add(svg, "line", { x1: kept, y1: y, x2: end, y2: y, class: "dead" });
    if (kept > from) add(svg, "line", { x1: from, y1: y, x2: kept, y2: y, class: "live" });
    let before = -Infinity;
    for (const step of each.checkpoints.toReversed()) {
      if (Math.abs(before - x(step)) < LEAST_PX && step !== each.checkpoints[0]) continue;
      before = x(step);
      const dot = add(svg, "circle", { cx: before, cy: y, r: 4, class: before <= kept ? "live" : "dead" });
      add(dot, "title", {}, `checkpoint of step ${step}`);
    }
    add(svg, "text", { x: end + 9, y: y + 4 }, compact(each.last_step || each.parent_step));
  }
}

function sentence(each) {
  const from = each.parent_attempt ? `from step ${each.parent_step} of attempt ${each.parent_attempt}` : "from the beginning";
  return `attempt ${each.attempt} ${from} to step ${each.last_step}, ${each.checkpoints.length} checkpoints${each.live ? "" : ", abandoned"}`;
}

function add(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
