"""Which live checkpoints the job's own quotas keep, each with its reason: regular ones by age, step and metric, and
speculative ones by their verdicts. Pure.

A speculative checkpoint waits for a verdict. Until one comes the last promoted stays, and of those behind it so many as
the quota says: first the one that has waited longest, or none would ever live to see its verdict; then the newest.
"""

from __future__ import annotations

from phalanx.checkpoint.facts import Facts, Policy
from phalanx.lineage import CheckpointRef


def kept_regular(policy: Policy, facts: Facts) -> dict[CheckpointRef, str]:
    """The live regular checkpoints that stay by the policy, with the reason of each."""
    if policy.keep_latest == 0:
        live = [ref for ref in facts.live() if ref not in facts.speculative]
        return dict.fromkeys(live, "all live checkpoints stay (checkpoint.keep_latest_k is 0)")
    good = [ref for ref in facts.good() if ref not in facts.speculative]
    kept = _best(policy, facts, good)
    if policy.keep_every:
        why = f"every {policy.keep_every} steps one stays (checkpoint.keep_every_n)"
        kept |= {ref: why for ref in good if ref.step % policy.keep_every == 0}
    why = f"among the newest {policy.keep_latest} (checkpoint.keep_latest_k)"
    return kept | dict.fromkeys(good[-policy.keep_latest :], why)


def _best(policy: Policy, facts: Facts, good: list[CheckpointRef]) -> dict[CheckpointRef, str]:
    """The best of `good`; of equal ones the newer are better."""
    sign = -1.0 if policy.best_order == "max" else 1.0
    known = [ref for ref in reversed(good) if ref in facts.measured]
    best = sorted(known, key=lambda ref: sign * facts.measured[ref])[: policy.keep_best]
    why = f"among the best {policy.keep_best} by {policy.best_by} (checkpoint.keep_best_m)"
    return {ref: f"{why}: {facts.measured[ref]:.6g}" for ref in best}


def kept_speculative(policy: Policy, facts: Facts) -> dict[CheckpointRef, str]:
    """The live speculative checkpoints that stay by their quota, with the reason of each."""
    last = facts.last_promoted()
    kept = {} if last is None else {last: "the last speculative checkpoint that was found healthy"}
    waiting = [ref for ref in facts.good() if _waits(ref, facts, last)]
    rest = policy.keep_speculative - 1
    why = f"among the newest speculative ones of {policy.keep_speculative} (checkpoint.speculative_keep_k)"
    kept |= dict.fromkeys(waiting[1:][-rest:] if rest else [], why)
    return kept | dict.fromkeys(waiting[:1], "the speculative checkpoint that is next to be found healthy")


def _waits(ref: CheckpointRef, facts: Facts, last: CheckpointRef | None) -> bool:
    is_open = ref in facts.speculative and ref not in facts.promoted and ref not in facts.unhealthy
    return is_open and (last is None or ref > last)


def why_over(ref: CheckpointRef, policy: Policy, facts: Facts) -> str:
    """Why a live checkpoint that no quota keeps goes."""
    if ref in facts.damaged:
        return f"damaged: {facts.damaged[ref]}"
    if ref not in facts.speculative:
        return f"older than the newest {policy.keep_latest} (checkpoint.keep_latest_k)"
    if ref in facts.unhealthy:
        return f"speculative, and not healthy: {facts.unhealthy[ref]}"
    last = facts.last_promoted()
    if last is not None and ref < last:
        return f"speculative, and older than the last one that was found healthy, {last}"
    return f"speculative, and more than {policy.keep_speculative} of them wait (checkpoint.speculative_keep_k)"
