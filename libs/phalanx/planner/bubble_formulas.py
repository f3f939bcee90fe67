"""What the papers say that each schedule leaves idle on a rank, in closed form: the yardstick of `pipeline.simulate`
and of what the trainer measures.

p ranks of v even stages; F, I and W seconds of a whole rank's forward, and of the halves of its backward for inputs
and weights, of one micro-batch; B = I + W. None of them grows with the number of micro-batches; the V schedules need at
least 2 p of them.
"""

from __future__ import annotations


def bubble_by_formula(
    schedule: str, pp: int, stages_per_rank: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    """Seconds of a step in which a rank does nothing.

    gpipe, 1f1b: (p - 1) (F + B); interleaved_1f1b: over v (Narayanan et al. 2021, arXiv 2104.04473, sections 2.2.1 and
    2.2.2); looped_bfs as interleaved_1f1b (Lamy-Poirier 2023, arXiv 2211.05953, section 4). interleaved_zero_bubble:
    (p - 1) (F + B - 2 W) / v, which is ZB1P's in the table of DualPipe's README. dualpipev: there
    (PP / 2 - 1) (F&B + B - 3 W) on PP / 2 devices, each of two stages: (p - 1) (F + 2 I - W) / 2, exact where F, I and
    W are alike. zbv: where they are alike, none between a rank's first and last action (Qi et al. 2024,
    arXiv 2405.15362, section 3); a step with its ends aligned waits for the first micro-batch to come down the V's
    first leg, (p - 1) F / 2.
    """
    waits = pp - 1
    whole = waits * (forward_s + input_s + weight_s)
    if schedule in ("gpipe", "1f1b"):
        return whole
    if schedule in ("interleaved_1f1b", "looped_bfs"):
        return whole / stages_per_rank
    if schedule == "interleaved_zero_bubble":
        return waits * (forward_s + input_s - weight_s) / stages_per_rank
    if schedule == "dualpipev":
        return waits * (forward_s + 2 * input_s - weight_s) / 2
    assert schedule == "zbv", schedule
    return waits * forward_s / 2
