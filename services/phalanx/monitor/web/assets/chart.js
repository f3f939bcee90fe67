// Lines over steps. Charts share one span of steps and one cursor; what was decimated is kept until a step, the span or
// the size changes, so that a moving cursor costs a stroke and no pass over the run.

import { compact } from "./format.js";
import * as paint from "./paint.js";
import { decimated, Series, smoothed } from "./series.js";

const MARGIN = { left: 60, right: 14, top: 10, bottom: 24 };
const NEAR_PX = 7, LEAST_DRAG_PX = 5;

// The steps that all charts show (null: the whole run, as it grows), and the step under the cursor.
export class Span {
  constructor() { this.range = this.cursor = null; this.charts = []; }
  show(range) { this.range = range; this.touch(); }
  point(step) { this.cursor = step; this.touch(); }
  touch() { for (const chart of this.charts) chart.touch(); }
}

export class Chart {
  // lines: [column, colour] each; the first one gives the figure in the heading.
  constructor(section, span, lines) {
    Object.assign(this, { span, lines, series: new Series(), isLog: false, weight: 0, marks: [], bands: [], dots: [], drag: null, drawn: 0 });
    this.canvas = section.querySelector("canvas");
    this.readout = section.querySelector("output");
    this.tip = section.querySelector(".tip");
    span.charts.push(this);
    this.watch = new ResizeObserver(() => this.touch());
    this.watch.observe(this.canvas);
    const hear = (name, action) => this.canvas.addEventListener(name, action);
    hear("pointermove", (event) => this.move(event.offsetX));
    hear("pointerleave", () => { if (this.drag === null) this.leave(); });
    hear("pointerdown", (event) => { this.drag = event.offsetX; this.canvas.setPointerCapture(event.pointerId); });
    hear("pointerup", (event) => this.release(event.offsetX));
    hear("pointercancel", () => { this.drag = null; this.leave(); });
    hear("dblclick", () => span.show(null));
    hear("keydown", (event) => this.press(event));
    hear("blur", () => this.leave());
  }

  // Draws at the next frame, once.
  touch() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); }); }

  // What people do.

  move(x) {
    this.pointer = x;
    const { series } = this;
    if (!series.length) return;
    const at = series.indexOf(this.stepAt(x));
    const nearest = at > 0 && at < series.length && this.stepAt(x) - series.step[at - 1] < series.step[at] - this.stepAt(x) ? at - 1 : at;
    this.span.point(series.step[Math.min(nearest, series.length - 1)]);
  }

  leave() { this.pointer = null; this.span.point(null); }

  release(x) {
    const from = this.drag;
    this.drag = null;
    if (from === null || Math.abs(x - from) < LEAST_DRAG_PX) return this.touch();
    this.span.show([from, x].sort((a, b) => a - b).map((each) => this.stepAt(each)));
  }

  press(event) {
    const [from, to] = this.bounds, cursor = this.span.cursor ?? to, stride = Math.max(1, (to - from) / 100);
    const acts = {
      ArrowLeft: () => this.move(this.xOf(Math.max(from, cursor - stride))),
      ArrowRight: () => this.move(this.xOf(Math.min(to, cursor + stride))),
      "+": () => this.zoom(cursor, 0.5),
      "-": () => this.zoom(cursor, 2),
      Escape: () => { this.span.show(null); this.leave(); },
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  }

  zoom(step, factor) {
    const [from, to] = this.bounds, [first, last] = this.whole;
    const range = [Math.max(first, step - (step - from) * factor), Math.min(last, step + (to - step) * factor)];
    if (range[1] - range[0] >= 2) this.span.show(range[0] === first && range[1] === last ? null : range);
  }

  // Where things are.

  get whole() { return [this.series.length ? this.series.step[0] : 0, Math.max(1, this.series.last("step") ?? 1)]; }
  get bounds() { return this.span.range ?? this.whole; }
  get box() { return { left: MARGIN.left, top: MARGIN.top, width: this.canvas.clientWidth - MARGIN.left - MARGIN.right, height: this.canvas.clientHeight - MARGIN.top - MARGIN.bottom }; }

  xOf(step) {
    const [from, to] = this.bounds, { left, width } = this.box;
    return left + ((step - from) / (to - from || 1)) * width;
  }

  stepAt(x) {
    const [from, to] = this.bounds, { left, width } = this.box;
    return from + ((x - left) / width) * (to - from);
  }

  // Drawing.

  draw() {
    const { clientWidth, clientHeight } = this.canvas, ratio = devicePixelRatio || 1;
    if (!clientWidth) return;
    const [wide, high] = [Math.round(clientWidth * ratio), Math.round(clientHeight * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) Object.assign(this.canvas, { width: wide, height: high });
    const context = this.canvas.getContext("2d"), { box } = this, style = getComputedStyle(this.canvas);
    const ink = (name) => style.getPropertyValue(name);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, clientWidth, clientHeight);
    context.font = `11px ${style.fontFamily}`;
    const layers = this.layers(box);
    const scale = (this.shown = this.scale(layers, box));
    paint.axes(context, box, scale, ink);
    context.save();
    context.beginPath();
    context.rect(box.left - 1, 0, box.width + 7, clientHeight);
    context.clip();
    for (const { from, to, color } of this.bands) paint.band(context, box, scale.x(from), scale.x(to), ink(color), 0.1);
    for (const { points, color, alpha } of layers) paint.curve(context, points, scale.y, ink(color), alpha);
    for (const { step, color } of this.marks) paint.mark(context, box, scale.x(step), ink(color));
    for (const { step, value } of this.dots) if (Number.isFinite(value)) paint.dot(context, scale.x(step), scale.y(value), ink("--held-out"), ink("--card"));
    this.drawCursor(context, box, scale, ink);
    context.restore();
    this.read();
    this.drawn += 1;
  }

  // Lines as decimated points: the values, and where they are smoothed, those faintly behind.
  layers(box) {
    const { series, weight, isLog } = this, [from, to] = this.bounds;
    const key = [series.version, from, to, box.width, weight, isLog].join();
    if (this.kept?.key === key && this.kept.series === series) return this.kept.layers;
    const first = Math.max(0, series.indexOf(from) - 1), end = Math.min(series.length, series.indexOf(to) + 2);
    const factor = box.width / (to - from || 1), toX = { factor, offset: box.left - from * factor };
    const points = (values) => decimated(series.step, values, first, end, toX, isLog);
    const layers = this.lines.flatMap(([column, color]) => {
      const values = series.columns[column];
      const own = { points: points(smoothed(values, series.length, weight)), color, alpha: 1 };
      return weight ? [{ points: points(values), color, alpha: 0.25 }, own] : [own];
    });
    this.kept = { key, series, layers };
    return layers;
  }

  scale(layers, box) {
    const { isLog } = this, [from, to] = this.bounds, bent = isLog ? Math.log10 : (value) => value;
    let low = Infinity, high = -Infinity;
    for (const { points } of layers) for (const point of points) { low = Math.min(low, point.low); high = Math.max(high, point.high); }
    if (low > high) [low, high] = isLog ? [1, 10] : [0, 1];
    if (low === high) [low, high] = [low * (low > 0 ? 0.9 : 1.1) - (low ? 0 : 1), high * (high > 0 ? 1.1 : 0.9) + (high ? 0 : 1)];
    const room = (bent(high) - bent(low)) * 0.06;
    [low, high] = [bent(low) - room, bent(high) + room];
    const y = (value) => box.top + (1 - (bent(value) - low) / (high - low)) * box.height;
    return { low, high, from, to, isLog, y, x: (step) => box.left + ((step - from) / (to - from || 1)) * box.width };
  }

  drawCursor(context, box, scale, ink) {
    if (this.drag !== null && this.pointer != null) {
      paint.band(context, box, Math.min(this.drag, this.pointer), Math.max(this.drag, this.pointer), ink("--train"), 0.15);
    }
    if (this.span.cursor === null) return;
    const x = Math.round(scale.x(this.span.cursor)) + 0.5, [column, color] = this.lines[0];
    const at = this.series.indexOf(this.span.cursor);
    const value = this.series.step[at] === this.span.cursor ? this.series.columns[column][at] : NaN;
    Object.assign(context, { strokeStyle: ink("--quiet"), lineWidth: 1 });
    paint.stroke(context, x, box.top, x, box.top + box.height);
    if (Number.isFinite(value)) paint.dot(context, x, scale.y(value), ink(color), ink("--card"));
  }

  // The figure under the cursor, or the last one; and what the marks near the pointer say.
  read() {
    const { series, span, lines } = this;
    const at = span.cursor === null ? series.length - 1 : Math.min(series.indexOf(span.cursor), series.length - 1);
    const values = at < 0 ? [] : lines.map(([column]) => compact(series.columns[column][at]));
    const text = at < 0 ? "" : span.cursor === null ? values[0] : `step ${series.step[at]}: ${values.join(", ")}`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
    if (!this.tip) return;
    const near = this.pointer == null || this.drag !== null ? [] : [...this.marks, ...this.dots].filter((each) => each.label && Math.abs(this.xOf(each.step) - this.pointer) <= NEAR_PX);
    const said = near.map((each) => each.label).join("\n");
    this.tip.hidden = !said;
    if (this.tip.textContent !== said) this.tip.textContent = said;
    if (said) {
      const { offsetLeft, clientWidth } = this.canvas, room = clientWidth - this.tip.offsetWidth;
      this.tip.style.left = `${offsetLeft + Math.max(0, Math.min(this.pointer + 12, room))}px`;
    }
  }
}
