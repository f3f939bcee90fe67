// Attempts as lines over steps, the newest on top: from the parent's step to the last one, a mark for each checkpoint, a
// join to the parent. What a later attempt did again is drawn as abandoned. Old attempts of many share one line.

import { compact } from "./format.js";

const LEFT = 150, WIDTH = 620, RIGHT = 60, LEAST_PX = 9, MAX_LINES = 24, TALL = 40, LOW = 22, MANY = 8;

export function drawLineage(svg, attempts) {
  const lines = folded(attempts);
  const height = lines.length > MANY ? LOW : TALL;
  const last = Math.max(1, ...lines.map((each) => each.end));
  const x = (step) => LEFT + (step / last) * (WIDTH - LEFT - RIGHT);
  const y = (i) => 14 + (lines.length - 1 - i) * height;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(1, lines.length) * height + 4}`);
  svg.setAttribute("aria-label", lines.toReversed().map(sentence).join("; ") || "no attempt yet");
  svg.replaceChildren();
  lines.forEach((each, i) => {
    const above = lines.findIndex((other) => other.numbers.has(each.join?.attempt));
    if (above >= 0) drawJoin(svg, x(each.join.step), y(above), y(i));
  });
  lines.forEach((each, i) => drawLine(svg, each, x, y(i), height === TALL));
}

// One line for each attempt; with many of them one for all old ones together.
function folded(attempts) {
  const leftAt = new Map(attempts.filter((each) => each.live).map((each) => [each.parent_attempt, each.parent_step]));
  const all = attempts.map((each) => lineOf(each, leftAt.get(each.attempt) ?? Infinity));
  if (all.length <= MAX_LINES) return all;
  const old = all.slice(0, all.length - MAX_LINES + 1);
  const numbers = new Set(old.flatMap((each) => [...each.numbers]));
  const together = {
    name: `attempts ${attempts[0].attempt}–${attempts[old.length - 1].attempt}`,
    layout: "", numbers, join: null, from: 0, count: old.length,
    kept: Math.max(0, ...old.map((each) => each.kept)), end: Math.max(...old.map((each) => each.end)),
    numLive: old.filter((each) => each.isLive).length, isLive: old.some((each) => each.isLive),
    saved: old.flatMap((each) => each.saved).sort((a, b) => a.step - b.step || a.isLive - b.isLive),
  };
  return [together, ...all.slice(old.length)];
}

// kept: the last step of it that counts.
function lineOf(each, leftAt) {
  const from = each.parent_step, end = Math.max(each.last_step, from), kept = each.live ? Math.min(end, leftAt) : from;
  const damaged = new Set(each.damaged), pinned = new Set(each.pinned);
  return {
    name: `attempt ${each.attempt}`, layout: each.layout, numbers: new Set([each.attempt]), from, kept, end, count: 1,
    numLive: each.live ? 1 : 0, isLive: each.live, join: each.parent_attempt ? { attempt: each.parent_attempt, step: from } : null,
    saved: each.checkpoints.map((step) => ({ step, isLive: each.live && step <= leftAt, isDamaged: damaged.has(step), isPinned: pinned.has(step) })),
  };
}

function drawJoin(svg, x, from, to) {
  add(svg, "path", { d: `M ${x} ${from} C ${x + 12} ${(from + to) / 2}, ${x + 12} ${(from + to) / 2}, ${x} ${to}`, class: "parent" });
}

function drawLine(svg, line, x, y, hasLayout) {
  const from = x(line.from), kept = x(line.kept), end = x(line.end);
  add(svg, "text", { x: 0, y: y + (hasLayout ? 1 : 4), class: "name" }, line.name);
  if (hasLayout) add(svg, "text", { x: 0, y: y + 15 }, line.layout);
  if (kept < end) add(svg, "line", { x1: kept, y1: y, x2: end, y2: y, class: "dead" });
  if (kept > from) add(svg, "line", { x1: from, y1: y, x2: kept, y2: y, class: "live" });
  for (const each of shown(line.saved, x)) drawSaved(svg, each, x(each.step), y);
  add(svg, "text", { x: end + 9, y: y + 4 }, compact(line.end));
}

// What would lie on another mark is left out, but never one that tells more than the other: the newest, what is damaged
// and what is pinned come first.
function shown(saved, x) {
  const taken = new Set(), slot = (each) => Math.round(x(each.step) / LEAST_PX);
  const weight = (each) => (each === saved.at(-1) ? 4 : 0) + (each.isDamaged ? 2 : 0) + (each.isPinned ? 2 : 0) + (each.isLive ? 1 : 0);
  return saved.toSorted((a, b) => weight(b) - weight(a)).filter((each) => !taken.has(slot(each)) && taken.add(slot(each))).sort((a, b) => a.step - b.step);
}

function drawSaved(svg, { step, isLive, isDamaged, isPinned }, x, y) {
  const group = add(svg, "g", { class: "saved" });
  const state = [isDamaged ? "damaged" : isLive ? "live" : "abandoned", isPinned ? "pinned" : ""].filter(Boolean).join(", ");
  add(group, "title", {}, `checkpoint of step ${step}: ${state}`);
  if (isPinned) add(group, "rect", { x: x - 7, y: y - 7, width: 14, height: 14, class: "pinned" });
  if (isDamaged) add(group, "path", { d: `M ${x - 4} ${y - 4} l 8 8 M ${x - 4} ${y + 4} l 8 -8`, class: "damaged" });
  else add(group, "circle", { cx: x, cy: y, r: 4, class: isLive ? "live" : "dead" });
}

function sentence(line) {
  const { join } = line;
  const from = join ? `from step ${join.step} of attempt ${join.attempt}` : "from the beginning";
  const of = (name, steps) => (steps.length ? `, ${name} ${steps.slice(0, 5).join(", ")}${steps.length > 5 ? ` and ${steps.length - 5} more` : ""}` : "");
  const steps = (is) => line.saved.filter(is).map((each) => each.step);
  const fate = line.count > 1 ? `, ${line.numLive} of them live` : line.isLive ? "" : ", abandoned";
  return `${line.name} ${from} to step ${line.end}, ${line.saved.length} checkpoints`
    + of("damaged", steps((each) => each.isDamaged)) + of("pinned", steps((each) => each.isPinned)) + fate;
}

function add(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
