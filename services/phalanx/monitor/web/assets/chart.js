// A line over steps on a canvas. Every pixel column shows the least and the greatest value that falls into it, so that
// drawing costs one pass over what is visible, however long the run, and no spike is lost. Charts share one span of steps.

import { compact } from "./format.js";
import { Series, smoothed } from "./series.js";

const MARGIN = { left: 58, right: 12, top: 8, bottom: 22 };

// The steps that all charts show; null means the whole run, as it grows.
export class Span {
  constructor() { this.range = null; this.charts = []; }
  show(range) { this.range = range; for (const chart of this.charts) chart.touch(); }
}

export class Chart {
  constructor(canvas, column, span, color) {
    Object.assign(this, { canvas, series: new Series(), column, span, color, log: false, weight: 0, marks: [], dots: [] });
    this.cursor = this.drag = null;
    this.drawn = 0;
    span.charts.push(this);
    new ResizeObserver(() => this.touch()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => { this.cursor = null; this.touch(); });
    canvas.addEventListener("pointerdown", (event) => { this.drag = event.offsetX; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("dblclick", () => span.show(null));
  }

  // Draws at the next frame, once.
  touch() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  move(event) { this.cursor = event.offsetX; this.touch(); }

  release(event) {
    const from = this.drag;
    this.drag = null;
    if (from === null || Math.abs(event.offsetX - from) < 5) return this.touch();
    const [a, b] = [from, event.offsetX].sort((x, y) => x - y).map((x) => this.stepAt(x));
    this.span.show([a, b]);
  }

  get bounds() {
    const { series } = this;
    return this.span.range ?? [series.length ? series.step[0] : 0, Math.max(1, series.last("step") ?? 1)];
  }

  x(step) {
    const [from, to] = this.bounds;
    return MARGIN.left + ((step - from) / (to - from || 1)) * this.width;
  }

  stepAt(x) {
    const [from, to] = this.bounds;
    return from + ((x - MARGIN.left) / this.width) * (to - from);
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.canvas;
    if (!clientWidth) return;
    if (this.canvas.width !== clientWidth * ratio || this.canvas.height !== clientHeight * ratio) {
      this.canvas.width = clientWidth * ratio;
      this.canvas.height = clientHeight * ratio;
    }
    this.width = clientWidth - MARGIN.left - MARGIN.right;
    this.height = clientHeight - MARGIN.top - MARGIN.bottom;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, clientWidth, clientHeight);
    context.font = "11px system-ui, sans-serif";
    const style = getComputedStyle(this.canvas);
    this.ink = (name) => style.getPropertyValue(name);
    const columns = this.columnsOf(smoothed(this.series.columns[this.column], this.series.length, this.weight));
    this.scale(columns);
    this.axes(context);
    context.save();
    context.beginPath();
    context.rect(MARGIN.left, 0, this.width, clientHeight);
    context.clip();
    this.drawMarks(context);
    this.drawLine(context, columns);
    this.drawDots(context);
    context.restore();
    this.drawCursor(context);
    this.drawn += 1;
  }

  // For each pixel column that has a value: [x, least, greatest, last].
  columnsOf(values) {
    const { series } = this;
    const [from, to] = this.bounds;
    const first = Math.max(0, series.indexOf(from) - 1);
    const last = Math.min(series.length, series.indexOf(to) + 2);
    const columns = [];
    let x = null, low = 0, high = 0, latest = 0;
    for (let i = first; i < last; i++) {
      const value = values[i];
      if (!Number.isFinite(value) || (this.log && value <= 0)) continue;
      const at = Math.round(this.x(series.step[i]));
      if (at === x) {
        if (value < low) low = value;
        if (value > high) high = value;
        latest = value;
      } else {
        if (x !== null) columns.push([x, low, high, latest]);
        x = at;
        low = high = latest = value;
      }
    }
    if (x !== null) columns.push([x, low, high, latest]);
    return columns;
  }

  scale(columns) {
    let low = Infinity, high = -Infinity;
    for (const [, least, greatest] of columns) {
      if (least < low) low = least;
      if (greatest > high) high = greatest;
    }
    if (low > high) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - Math.abs(low) * 0.1 - 1e-9, high + Math.abs(high) * 0.1 + 1e-9];
    const bent = this.log ? Math.log10 : (value) => value;
    const room = (bent(high) - bent(low)) * 0.05;
    [this.low, this.high] = [bent(low) - room, bent(high) + room];
    this.y = (value) => MARGIN.top + (1 - (bent(value) - this.low) / (this.high - this.low)) * this.height;
  }

  axes(context) {
    context.strokeStyle = this.ink("--line");
    context.fillStyle = this.ink("--quiet");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of ticks(this.low, this.high, 5)) {
      const value = this.log ? 10 ** tick : tick;
      const y = Math.round(this.y(value)) + 0.5;
      line(context, MARGIN.left, y, MARGIN.left + this.width, y);
      context.fillText(compact(value), MARGIN.left - 6, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of ticks(...this.bounds, 8)) {
      context.fillText(compact(step), this.x(step), MARGIN.top + this.height + 6);
    }
  }

  drawLine(context, columns) {
    context.strokeStyle = this.ink(this.color);
    context.lineWidth = 1.4;
    context.lineJoin = "round";
    context.beginPath();
    columns.forEach(([x, low, high, latest], i) => {
      if (i === 0) context.moveTo(x, this.y(low));
      else context.lineTo(x, this.y(low));
      if (low !== high) { context.lineTo(x, this.y(high)); context.lineTo(x, this.y(latest)); }
    });
    context.stroke();
  }

  drawMarks(context) {
    for (const { step, color } of this.marks) {
      context.strokeStyle = this.ink(color);
      context.lineWidth = 1.5;
      const x = Math.round(this.x(step)) + 0.5;
      line(context, x, MARGIN.top, x, MARGIN.top + this.height);
    }
  }

  drawDots(context) {
    context.fillStyle = this.ink("--held-out");
    for (const { step, value } of this.dots) {
      if (!Number.isFinite(value)) continue;
      context.beginPath();
      context.arc(this.x(step), this.y(value), 3.5, 0, 2 * Math.PI);
      context.fill();
    }
  }

  drawCursor(context) {
    if (this.cursor === null || !this.series.length) return;
    if (this.drag !== null) {
      context.fillStyle = this.ink(this.color);
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(this.drag, this.cursor), MARGIN.top, Math.abs(this.cursor - this.drag), this.height);
      context.globalAlpha = 1;
    }
    const i = Math.min(this.series.length - 1, this.series.indexOf(this.stepAt(this.cursor)));
    const step = this.series.step[i], x = Math.round(this.x(step)) + 0.5;
    const near = this.marks.filter((mark) => Math.abs(this.x(mark.step) - this.cursor) < 4 && mark.label).map((mark) => mark.label);
    const text = [`step ${step}: ${compact(this.series.columns[this.column][i])}`, ...near].join("  ·  ");
    context.strokeStyle = this.ink("--quiet");
    line(context, x, MARGIN.top, x, MARGIN.top + this.height);
    const wide = context.measureText(text).width + 12;
    const left = Math.max(MARGIN.left, Math.min(x + 8, MARGIN.left + this.width - wide));
    context.fillStyle = this.ink("--card");
    context.fillRect(left, MARGIN.top, wide, 20);
    context.fillStyle = this.ink("--ink");
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(text, left + 6, MARGIN.top + 10);
  }
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

// Round numbers between two ends, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= rough);
  const out = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high; tick += size) out.push(tick);
  return out;
}
