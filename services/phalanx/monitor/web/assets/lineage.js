// Attempts as rows over steps: from the parent's step to the last one, a dot for each checkpoint, an arc from the parent.

import { compact } from "./format.js";

const ROW = 26, LEFT = 90, WIDTH = 560;

export function drawLineage(svg, attempts) {
  const last = Math.max(1, ...attempts.map((each) => each.last_step));
  const x = (step) => LEFT + (step / last) * (WIDTH - LEFT - 130);
  const row = new Map(attempts.map((each, i) => [each.attempt, 18 + i * ROW]));
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${18 + attempts.length * ROW}`);
  svg.replaceChildren();
  for (const each of attempts) {
    const y = row.get(each.attempt), kind = each.live ? "live" : "dead";
    if (row.has(each.parent_attempt)) {
      const from = row.get(each.parent_attempt), at = x(each.parent_step);
      add(svg, "path", { d: `M ${at} ${from} C ${at} ${(from + y) / 2}, ${at} ${(from + y) / 2}, ${at} ${y}`, class: "parent" });
    }
    add(svg, "text", { x: 0, y: y + 4 }, `attempt ${each.attempt}`);
    add(svg, "line", { x1: x(each.parent_step), y1: y, x2: x(each.last_step), y2: y, class: kind, "stroke-width": 2 });
    for (const step of each.checkpoints) {
      const dot = add(svg, "circle", { cx: x(step), cy: y, r: 4, class: kind });
      add(dot, "title", {}, `checkpoint of step ${step}`);
    }
    add(svg, "text", { x: x(each.last_step) + 10, y: y + 4 }, `${compact(each.last_step)}  ${each.layout}`);
  }
}

function add(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
