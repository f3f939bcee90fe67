// Figures as people read them.

export function compact(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  if (size >= 100 || Number.isInteger(value)) return `${Math.round(value)}`;
  return value.toPrecision(4);
}

export function seconds(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  if (value < 172800) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} d`;
}

export const bytes = (value) => (value == null ? "–" : `${compact(value)}B`);
export const words = (name) => (name ?? "").replaceAll("_", " ");
export const clock = (iso) => (iso ? new Date(iso).toLocaleTimeString([], { hour12: false }) : "");
