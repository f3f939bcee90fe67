// All experts of a mixture at one step: a row a layer, a cell an expert, the darker the less it had and the brighter the
// more, against the mean of its layer.

const EVEN = 128, STEPS_AN_OCTAVE = 16, OCTAVES = 3;
const LEAST_PX = 60, MOST_PX = 240, ROW_PX = 14;

// The cells as multiples of the mean of their layer, row by row; 0 for no token.
export function multiples(load) {
  return Float64Array.from(atob(load), (cell) => { const level = cell.charCodeAt(0); return level ? 2 ** ((level - EVEN) / STEPS_AN_OCTAVE) : 0; });
}

export class Heat {
  constructor(section) {
    Object.assign(this, { section, told: null, cells: null });
    this.canvas = section.querySelector("canvas");
    this.readout = section.querySelector("output");
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.read(null));
  }

  // What a monitor told last; null hides it.
  show(told) {
    if (told === this.told) return;
    this.told = told;
    this.cells = told ? multiples(told.load) : null;
    this.width = told ? Math.ceil(told.num_experts / told.experts_per_cell) : 0;
    this.rows = told ? Array.from({ length: told.num_layers }, (_, row) => this.cells.subarray(row * this.width, (row + 1) * this.width).some(Boolean)) : [];
    this.section.hidden = !told || !this.width || this.cells.length !== this.width * told.num_layers;
    if (this.section.hidden) return;
    this.draw();
    this.read(null);
  }

  draw() {
    if (this.section.hidden || !this.cells) return;
    const { canvas, cells, width } = this, height = this.told.num_layers, style = getComputedStyle(canvas);
    const ink = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
    const [none, even, most] = [ink("--heat-none"), ink("--heat-even"), ink("--heat-most")];
    Object.assign(canvas, { width, height });
    canvas.style.height = `${Math.min(MOST_PX, Math.max(LEAST_PX, ROW_PX * height))}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(width, height);
    cells.forEach((value, i) => {
      const level = Math.max(-1, Math.min(1, Math.log2(value) / OCTAVES)), to = level < 0 ? none : most;
      const color = even.map((from, j) => Math.round(from + (to[j] - from) * Math.abs(level)));
      image.data.set([...color, this.hasExperts(i) ? 255 : 0], 4 * i);
    });
    context.putImageData(image, 0, 0);
  }

  point(x, y) {
    const { clientWidth, clientHeight } = this.canvas;
    const column = Math.min(this.width - 1, Math.max(0, Math.floor((x / clientWidth) * this.width)));
    const row = Math.min(this.told.num_layers - 1, Math.max(0, Math.floor((y / clientHeight) * this.told.num_layers)));
    this.read(row * this.width + column);
  }

  // A cell, or where nobody points the busiest one.
  read(at) {
    if (!this.cells) return;
    const { cells, told } = this, busiest = cells.reduce((best, value, i) => (value > cells[best] ? i : best), 0);
    const present = cells.reduce((count, _, i) => count + this.hasExperts(i), 0);
    const idle = cells.reduce((count, value, i) => count + (this.hasExperts(i) && value === 0), 0);
    const whole = `step ${told.step}: busiest ${this.name(busiest)}, ${idle} of ${present} idle`;
    const said = at === null ? whole : this.name(at);
    if (this.readout.textContent !== said) this.readout.textContent = said;
    this.canvas.setAttribute("aria-label", `load of every expert, ${whole}`);
  }

  // Layers without any have no token, and are left blank.
  hasExperts(at) { return this.rows[Math.floor(at / this.width)]; }

  name(at) {
    const { told, cells, width } = this, first = (at % width) * told.experts_per_cell;
    const last = Math.min(told.num_experts, first + told.experts_per_cell) - 1;
    if (!this.hasExperts(at)) return `layer ${Math.floor(at / width)} has no experts`;
    return `layer ${Math.floor(at / width)}, expert ${first === last ? first : `${first}–${last}`} ${cells[at].toFixed(2)} x mean`;
  }
}
