// One run: first as it stands, then what is new, until closed.

import { ask, follow } from "./api.js";
import { words } from "./format.js";
import { Series } from "./series.js";

const MAX_POINTS = 200000, RETRY_MS = 1000;

export class Run {
  constructor(job, onShow, onLink) {
    Object.assign(this, { job, onShow, onLink, isClosed: false, unfollow: null, version: 0 });
    this.forget();
  }

  forget() {
    Object.assign(this, { series: new Series(), incidents: new Map(), events_: new Map(), evaluations: new Map(), metrics: new Map(), heat: null, attempts: [], ranks: [], summary: null });
  }

  get events() { return [...this.events_.values()]; }

  // Asks until there is an answer, then follows.
  async open() {
    this.pause();
    try {
      const run = await ask("run", { job: this.job, max_points: MAX_POINTS });
      if (this.isClosed) return;
      this.forget();
      this.take(run);
      this.resume();
    } catch (error) {
      if (this.isClosed) return;
      this.onLink(false, error);
      this.retry = setTimeout(() => this.open(), RETRY_MS);
    }
  }

  pause() {
    clearTimeout(this.retry);
    this.unfollow?.();
    this.unfollow = null;
  }

  resume() {
    this.pause();
    if (document.hidden) return;
    this.unfollow = follow(this.job, this.version, (change) => this.hear(change), this.onLink);
  }

  close() { this.isClosed = true; this.pause(); }

  // A monitor that began anew tells a long run anew, and thinned: then all of it is asked for.
  hear(change) {
    const told = change.curve?.step ?? [], { series } = this;
    if (told.length && series.length > told.length && told[0] <= series.step[0]) this.open();
    else this.take(change);
  }

  take(change) {
    const redone = this.series.append(change.curve), step = change.summary.step;
    if (redone !== null) this.drop(redone);
    if (this.series.cut(step)) this.drop(step + 1);
    for (const each of change.incidents ?? []) this.incidents.set(each.id, each);
    for (const each of change.events ?? []) this.events_.set(each.revision, each);
    for (const each of change.evaluations ?? []) this.evaluate(each);
    if (change.expert_heat) this.heat = change.expert_heat;
    if (change.attempts?.length) this.attempts = change.attempts;
    this.hasNews ||= Boolean(change.incidents?.length || change.events?.length || change.attempts?.length);
    Object.assign(this, { summary: change.summary, ranks: change.ranks ?? [], version: change.version });
    this.frame ??= requestAnimationFrame(() => { this.frame = null; if (!this.isClosed) this.onShow(this); });
  }

  // The held-out loss, and the job's own metrics by name and step.
  evaluate({ step, loss, metrics }) {
    this.evaluations.set(step, loss ?? NaN);
    for (const [name, value] of Object.entries(metrics ?? {})) {
      if (!this.metrics.has(name)) this.metrics.set(name, new Map());
      this.metrics.get(name).set(step, value ?? NaN);
    }
  }

  // Evaluations of steps that are done again.
  drop(first) {
    for (const known of [this.evaluations, ...this.metrics.values()]) for (const step of [...known.keys()]) if (step >= first) known.delete(step);
  }

  // What charts mark: incidents, where attempts began, and which steps they did again.
  get marks() {
    const begun = this.attempts.slice(1).filter((each) => each.parent_step || each.last_step).map((each) => ({
      step: each.parent_step, color: "--attempt", label: `attempt ${each.attempt} from step ${each.parent_step}${each.layout ? `: ${each.layout}` : ""}`,
    }));
    const wrong = [...this.incidents.values()].filter((each) => each.step).map((each) => ({
      step: each.step, color: "--incident", label: [`step ${each.step}, ${words(each.cause?.kind)}: ${each.cause?.message ?? ""}`, each.outcome].filter(Boolean).join(" → "),
    }));
    return [...begun, ...wrong];
  }

  get bands() {
    const lastOf = new Map(this.attempts.map((each) => [each.attempt, each.last_step]));
    return this.attempts
      .map((each) => ({ from: each.parent_step, to: lastOf.get(each.parent_attempt) ?? 0, color: "--attempt" }))
      .filter((each) => each.to > each.from);
  }

  get dots() {
    return [...this.evaluations].map(([step, value]) => ({ step, value, label: `held-out loss at step ${step}: ${value.toPrecision(4)}` }));
  }
}
