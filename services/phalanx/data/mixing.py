"""Takes wishes for other weights of a job's sources, and grants them with the plans that are handed out.

A wish is an object in the job's own storage; nothing changes until the next plan is asked for. Then it is written into
the journal, to hold from the first window that no plan has shown: plans are asked for in their order, and one that is
asked for late (a call that hung) is seen by the horizons handed out since.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from phalanx.core.errors import PhalanxError
from phalanx.data.jobs import FoundJob, keep
from phalanx.lineage import JournalEntry, Lineage, position_after
from phalanx.lineage.plan import MIXTURE_KIND, MixtureChange, mixture_changes
from phalanx.lineage.registry import JobName
from phalanx.lineage.wishes import Wish, Wishes, earliest_change, grant
from phalanx.objects import ObjectStore
from phalanx.spec import Job
from phalanx.trainer.mixing import mixture_of

MAX_TEXT: Final = 64
_KEPT_JOBS: Final = 4096
_ENDLESS_TOKENS: Final = 1 << 50  # of a source, where only its weight counts
_NUM_LOCKS: Final = 64


def wish_for_weights(
    store: ObjectStore, job: Job, weights: Mapping[str, str], request_id: str, steps: int | None = None
) -> Wish:
    """Keeps the wish. store: rooted at the job; weights: by source, as text; steps: after how many the job is done,
    where it may have others by now than `job` says.

    Raises PhalanxError for a job of one split, sources that it does not have, what is no weight, a request id that
    asked for something else, and a new wish for a job that is done, or one that would leave no source to read.
    """
    check_weights(job, weights)
    wishes = Wishes(store)
    known = wishes.all()
    if all(wish.request_id != request_id for wish in known):
        _require_steps_to_come(store, job, job.training.steps if steps is None else steps)
        _require_weight(Lineage(store), job, known, weights)
    return wishes.add(MIXTURE_KIND, {"weights": dict(sorted(weights.items()))}, request_id)


def _require_steps_to_come(store: ObjectStore, job: Job, steps: int) -> None:
    live = Lineage(store).checkpoints()
    if live and live[-1].step >= steps:
        raise PhalanxError(
            f"job {job.job.name}",
            value=f"done, at step {live[-1].step}",
            expected="a job that has steps to train, as weights hold from its next reading plan on",
            remedy="give it more training.steps first, or fork it",
        )


def _require_weight(lineage: Lineage, job: Job, known: Sequence[Wish], weights: Mapping[str, str]) -> None:
    """Raises PhalanxError where `weights` would leave every source at 0, with those that hold by the job file, the
    journal and the wishes before it: the run would end there.
    """
    record, newest, live = lineage.read_job(), lineage.newest_attempt(), lineage.checkpoints()
    origin = record.origin if record is not None else None
    step = live[-1].step if live else origin.step if origin is not None else 0
    entries = lineage.journal(newest.number) if newest is not None else ()
    position = earliest_change(entries, position_after(step, job.training.global_batch_size, origin))
    granted = {entry.request_id for entry in entries}
    wanted = [wish.payload["weights"] for wish in known if wish.entry_id not in granted]
    changes = [MixtureChange(position, tuple(sorted(each.items()))) for each in (*wanted, weights)]
    endless = dict.fromkeys(job.data.training, _ENDLESS_TOKENS)
    if mixture_of(job, endless, origin, (*mixture_changes(entries), *changes)).end == position:
        raise PhalanxError(
            f"weights {', '.join(f'{name}={text}' for name, text in sorted(weights.items()))}",
            expected="one source above 0 at least: the others are at 0 already, so there would be nothing to read",
            remedy="give one of them a number above 0 in the same command",
        )


def check_weights(job: Job, weights: Mapping[str, str]) -> None:
    """Raises PhalanxError unless `weights` can be set in `job`."""
    sources = job.data.sources
    if not sources:
        raise PhalanxError(
            f"job {job.job.name}",
            value="a job that reads one split",
            expected="a job with [data.sources.NAME]",
            remedy="which splits a job reads is its identity: fork it with sources that have weights",
        )
    if not weights:
        raise PhalanxError("weights", value="none", expected="one at least", remedy="give --set NAME=WEIGHT")
    for name, text in weights.items():
        if name not in sources:
            raise PhalanxError(
                f"source {name[:MAX_TEXT]}",
                expected=f"one of the job's sources ({', '.join(sorted(sources))})",
                remedy="a run keeps its sources, as they are its identity: fork the job to add one",
            )
        parsed_weight(name, text)
    if set(weights) == set(sources) and not any(parsed_weight(name, text) for name, text in weights.items()):
        raise PhalanxError(
            f"weights {', '.join(f'{name}={text}' for name, text in sorted(weights.items()))}",
            expected="one above 0 at least: with all of them 0 there is nothing to read",
            remedy="give one of the sources a number above 0",
        )


def parsed_weight(name: str, text: str) -> Fraction:
    """A weight as text, exactly; raises PhalanxError."""
    if _WEIGHT.fullmatch(text) is None or (weight := _fraction(text)) is None:
        raise PhalanxError(
            f"weight of {name}",
            value=text[:MAX_TEXT],
            expected="a number of 0 or more, such as 0.3 or 1/3",
            remedy="correct it",
        )
    return weight


# Short, and with a short exponent: what it takes to write a number out must stay small.
_WEIGHT: Final = re.compile(r"[0-9]{1,30}(/[0-9]{1,30}|(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?)")


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except ZeroDivisionError:
        return None


@dataclass(frozen=True, slots=True)
class _Shown:
    """How far plans of an attempt reach."""

    attempt: int
    horizon_step: int


class Granting:
    """Grants wishes when plans are handed out. One plan of a job at a time, as a plan may only show what no other one
    contradicts.
    """

    def __init__(self) -> None:
        self._shown: OrderedDict[JobName, _Shown] = OrderedDict()
        self._lock = threading.Lock()
        self._locks = tuple(threading.Lock() for _ in range(_NUM_LOCKS))

    def turn(self, name: JobName) -> threading.Lock:
        """Held by who makes a plan of the job, until it is noted as shown."""
        return self._locks[hash(name) % _NUM_LOCKS]

    def grant(self, found: FoundJob, job: Job, attempt: int, live: Sequence[JournalEntry], step: int) -> bool:
        """As `wishes.grant`, for a plan that holds once `step` is done."""
        if not job.data.is_mixture:
            return False
        with self._lock:
            shown = self._shown.get(found.name)
        reached = max(step, shown.horizon_step) if shown is not None and shown.attempt == attempt else step
        record = found.lineage.read_job()
        origin = record.origin if record is not None else None
        position = position_after(reached, job.training.global_batch_size, origin)
        return grant(found.lineage, Wishes(found.store), attempt, live, position)

    def show(self, name: JobName, attempt: int, horizon_step: int) -> None:
        """Notes that a plan was handed out."""
        with self._lock:
            shown = self._shown.get(name)
            if shown is not None and shown.attempt == attempt:
                horizon_step = max(horizon_step, shown.horizon_step)
            keep(self._shown, name, _Shown(attempt, horizon_step), _KEPT_JOBS)
