// Strokes on a canvas. `box` is the place of the curve itself; `y` turns a value into a place.

import { compact } from "./format.js";

export function axes(context, box, scale, ink) {
  Object.assign(context, { strokeStyle: ink("--line"), fillStyle: ink("--quiet"), lineWidth: 1, textAlign: "right", textBaseline: "middle" });
  for (const tick of ticks(scale.low, scale.high, Math.max(2, Math.round(box.height / 40)))) {
    const value = scale.isLog ? 10 ** tick : tick, y = Math.round(scale.y(value)) + 0.5;
    stroke(context, box.left, y, box.left + box.width, y);
    context.fillText(compact(value), box.left - 8, y);
  }
  Object.assign(context, { textAlign: "center", textBaseline: "top" });
  for (const step of ticks(scale.from, scale.to, Math.max(2, Math.round(box.width / 70)))) {
    if (Number.isInteger(step)) context.fillText(compact(step), scale.x(step), box.top + box.height + 7);
  }
}

// A line through decimated points, with its gaps.
export function curve(context, points, y, color, alpha = 1) {
  Object.assign(context, { strokeStyle: color, lineWidth: 1.6, lineJoin: "round", lineCap: "round", globalAlpha: alpha });
  context.beginPath();
  for (const { x, enter, low, high, leave, gap } of points) {
    if (gap) context.moveTo(x - 0.1, y(enter));
    context.lineTo(x, y(enter));
    if (low !== high) for (const value of [low, high, leave]) context.lineTo(x, y(value));
  }
  context.stroke();
  context.globalAlpha = 1;
}

// An upright line with a head that is easy to hit.
export function mark(context, box, x, color) {
  Object.assign(context, { strokeStyle: color, fillStyle: color, lineWidth: 1, globalAlpha: 0.55 });
  stroke(context, Math.round(x) + 0.5, box.top, Math.round(x) + 0.5, box.top + box.height);
  context.globalAlpha = 1;
  context.beginPath();
  context.moveTo(x - 5, box.top);
  context.lineTo(x + 5, box.top);
  context.lineTo(x, box.top + 8);
  context.fill();
}

export function band(context, box, from, to, color, alpha) {
  Object.assign(context, { fillStyle: color, globalAlpha: alpha });
  context.fillRect(from, box.top, Math.max(1, to - from), box.height);
  context.globalAlpha = 1;
}

export function dot(context, x, y, color, edge) {
  Object.assign(context, { fillStyle: color, strokeStyle: edge, lineWidth: 1.5 });
  context.beginPath();
  context.arc(x, y, 4, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
}

export function stroke(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

// Round numbers between two ends, about `count` of them.
export function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= rough * 0.999);
  const first = Math.ceil(low / size), last = Math.floor(high / size);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * size).toPrecision(12)));
}
