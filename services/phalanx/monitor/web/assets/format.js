// Figures as people read them. A figure and its unit stay on one line.

export const NARROW = "\u00a0";

export function compact(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}${NARROW}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}${NARROW}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}${NARROW}k`;
  if (size >= 100 || Number.isInteger(value)) return `${Math.round(value)}`;
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return `${Number(value.toPrecision(4))}`;
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 1) return `${(value * 1000).toFixed(0)}${NARROW}ms`;
  if (value < 120) return `${value.toFixed(1)}${NARROW}s`;
  if (value < 7200) return `${(value / 60).toFixed(0)}${NARROW}min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)}${NARROW}h`;
  return `${(value / 86400).toFixed(1)}${NARROW}d`;
}

export const age = (value) => (value < 120 ? `${Math.floor(value)}${NARROW}s` : seconds(value));

// Parts of the wall time of a step, as records name them, and what is told of each.
export const PARTS = {
  data_wait_s: "data", forward_s: "forward", backward_s: "backward", communication_s: "communication",
  optimizer_s: "optimizer", checkpoint_s: "saves", evaluation_s: "evaluation", rest_s: "rest",
};

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const power = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log2(value || 1) / 10)));
  return `${Number((value / 1024 ** power).toPrecision(3))}${NARROW}${UNITS[power]}`;
}

export const percent = (value) => (value == null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}${NARROW}%`);
export const words = (name) => (name ?? "").replaceAll("_", " ").replace(/^nan$/, "not a number");
export const clock = (iso) => (iso ? new Date(iso).toLocaleTimeString([], { hour12: false }) : "");
export const shortName = (job) => job.replace(/^projects\/(.*)\/jobs\//, "$1 / ");
