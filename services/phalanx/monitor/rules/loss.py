"""What the loss says: not finite, a spike, a divergence. A fold over steps: `judged(state, step)` is pure.

**Not finite.** At the step itself. Up to `max_in_row` steps in a row are told one by one, so that each one's windows
can be left out, from the `again`-th on as a range from the first of the row; at `max_in_row` the run is taken for
diverged, and the row is silent from there on.

**Spike.** A loss above `median + max(k x sigma, min_rise x |median|)` of the last `window` losses that were not raised
themselves, for `consecutive` steps in a row. sigma = 1.4826 x MAD (median absolute deviation: the standard deviation of
a normal distribution, and unmoved by up to half of the window being outliers). No verdict before `warm_up` losses of
the run were seen, nor twice for one row of raised steps; a row as long as the window is the new level. The falling
curve at a run's beginning lifts the median above the newest losses and so makes the rule slower, never falser.

**Divergence.** The median of the last `smooth` losses (raised ones included) is above its own best by more than
`max(k x sigma at the best, climb x |best|)` for `patience` steps in a row. Told once; again only after it came back
within half of that margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from phalanx.monitor.rules.verdict import Kind, Verdict

SIGMA_OF_MAD = 1.4826


@dataclass(frozen=True, slots=True)
class LossRule:
    """The figures of the three rules, as above. Windows, warm-up and patience in steps."""

    window: int = 128
    warm_up: int = 64
    k: float = 6.0
    min_rise: float = 0.02
    consecutive: int = 3
    smooth: int = 64
    climb: float = 0.05
    patience: int = 200
    again: int = 3
    max_in_row: int = 10


@dataclass(frozen=True, slots=True)
class LossState:
    """What the rules know of a run's attempt.

    normal: the last losses that were not raised. raised: the steps in a row that are, with their losses. recent: the
    last losses, raised or not. best, best_step, spread: the best smoothed loss, where, and sigma there. num_above,
    first_above: steps in a row above the margin, and the first of them. num_bad: steps in a row that were not finite.
    last_step: the last one judged. is_told: this divergence was told.
    """

    normal: tuple[float, ...] = ()
    raised: tuple[tuple[int, float], ...] = ()
    recent: tuple[float, ...] = ()
    best: float = math.inf
    best_step: int = 0
    spread: float = 0.0
    num_above: int = 0
    first_above: int = 0
    num_bad: int = 0
    last_step: int = 0
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class LossStep:
    """A step's loss; is_finite: of loss and gradient norm."""

    attempt: int
    step: int
    loss: float
    is_finite: bool = True


def judged(rule: LossRule, state: LossState, at: LossStep) -> tuple[LossState, tuple[Verdict, ...]]:
    """The state after a step and what went wrong in it. A step that was judged before changes nothing."""
    if at.step <= state.last_step:
        return state, ()
    state = replace(state, last_step=at.step)
    if not at.is_finite or not math.isfinite(at.loss):
        return _not_finite(rule, state, at)
    state, spikes = _spike(rule, replace(state, num_bad=0), at)
    state, divergences = _divergence(rule, state, at)
    return state, spikes + divergences


def _not_finite(rule: LossRule, state: LossState, at: LossStep) -> tuple[LossState, tuple[Verdict, ...]]:
    state = replace(state, num_bad=state.num_bad + 1)
    if state.num_bad > rule.max_in_row:
        return state, ()
    is_again = state.num_bad >= rule.again
    first = at.step - state.num_bad + 1
    message = "loss or gradient is not finite" + (f", {state.num_bad} steps in a row" if is_again else "")
    found: tuple[Verdict, ...] = (
        Verdict(Kind.NAN, at.attempt, first if is_again else at.step, at.step, message, at.step),
    )
    if state.num_bad == rule.max_in_row:
        message = f"loss or gradient not finite for {rule.max_in_row} steps in a row"
        found += (Verdict(Kind.DIVERGENCE, at.attempt, first, at.step, message, first, key="nan"),)
    return state, found


def _spike(rule: LossRule, state: LossState, at: LossStep) -> tuple[LossState, tuple[Verdict, ...]]:
    center, limit = spike_limit(rule, state.normal)
    if len(state.normal) < rule.warm_up or at.loss <= limit:
        return replace(state, normal=(*state.normal, at.loss)[-rule.window :], raised=()), ()
    raised = (*state.raised, (at.step, at.loss))
    if len(raised) >= rule.window:
        return replace(state, normal=tuple(loss for _, loss in raised), raised=()), ()
    state = replace(state, raised=raised)
    if len(raised) != rule.consecutive:
        return state, ()
    first, highest = raised[0][0], max(loss for _, loss in raised)
    message = f"loss {highest:.4g} against a median of {center:.4g} (limit {limit:.4g}), steps {first} to {at.step}"
    return state, (Verdict(Kind.SPIKE, at.attempt, first, at.step, message, first),)


def spike_limit(rule: LossRule, losses: tuple[float, ...]) -> tuple[float, float]:
    """The median of the losses, and above what a loss is raised."""
    if not losses:
        return math.nan, math.inf
    center = median(losses)
    return center, center + max(rule.k * sigma(losses, center), rule.min_rise * abs(center))


def sigma(losses: tuple[float, ...], center: float) -> float:
    """A robust standard deviation."""
    return SIGMA_OF_MAD * median(abs(loss - center) for loss in losses)


def _divergence(rule: LossRule, state: LossState, at: LossStep) -> tuple[LossState, tuple[Verdict, ...]]:
    recent = (*state.recent, at.loss)[-rule.smooth :]
    state = replace(state, recent=recent)
    if len(recent) < rule.smooth:
        return state, ()
    smoothed = median(recent)
    if smoothed <= state.best:
        spread = sigma(recent, smoothed)
        return replace(state, best=smoothed, best_step=at.step, spread=spread, num_above=0, is_told=False), ()
    margin = max(rule.k * state.spread, rule.climb * abs(state.best))
    if smoothed <= state.best + margin:
        is_told = state.is_told and smoothed > state.best + margin / 2
        return replace(state, num_above=0, is_told=is_told), ()
    first_above = state.first_above if state.num_above else at.step
    state = replace(state, num_above=state.num_above + 1, first_above=first_above)
    if state.num_above < rule.patience or state.is_told:
        return state, ()
    message = (
        f"smoothed loss {smoothed:.4g} is above its best, {state.best:.4g} at step {state.best_step}, "
        f"for {state.num_above} steps"
    )
    verdict = Verdict(Kind.DIVERGENCE, at.attempt, first_above, at.step, message, first_above)
    return replace(state, is_told=True), (verdict,)
