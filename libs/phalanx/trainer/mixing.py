"""What a job reads: its sources with their orders, and the mixture that follows from its job file, its origin and its
journal. Free of torch, for commands and services too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.lineage import ForkPoint, position_after
from phalanx.lineage.plan import LostWindows, MixtureChange, Spans
from phalanx.spec import Job
from phalanx.spec.data import exact, exact_weights
from phalanx.stream.manifest import Split, open_split, refuse_held_out
from phalanx.stream.mixture import EXACT_STEPS, Change, Limit, Mixture
from phalanx.stream.sources import Source, source_of_shards
from phalanx.stream.view import View
from phalanx.trainer.places import order_of, store_at


def training_splits(job: Job, node_folder: Path | None = None) -> dict[str, Split]:
    """The manifest of each training source, by name in the order in which sources are numbered. node_folder: as for
    `open_split`.

    Raises PhalanxError, with the key that names it, for one that can't be opened, was held out, has another digest than
    the job file says, or another tokenizer than the first.
    """
    splits: dict[str, Split] = {}
    for name, source in job.data.training.items():
        key = job.data.key_of(name)
        try:
            split = open_split(store_at(job, source.url), node_folder=node_folder)
        except PhalanxError as error:
            raise PhalanxError(
                f"{key} at {error.where}", value=error.value, expected=error.expected, remedy=error.remedy
            ) from error
        refuse_held_out(split, key)
        splits[name] = split
    _require_one_tokenizer(job, splits)
    _require_other_data(job, splits)
    job.identity_digest({name: split.digest for name, split in splits.items()})  # raises for another digest
    return splits


def _require_one_tokenizer(job: Job, splits: Mapping[str, Split]) -> None:
    """Token ids of two tokenizers mean different texts. The type follows from the vocabulary, so it is one as well."""
    first, *others = splits
    for name in others:
        one, other = splits[first], splits[name]
        if other.tokenizer_digest != one.tokenizer_digest or other.dtype != one.dtype:
            raise PhalanxError(
                job.data.key_of(name),
                value=f"a split made with the tokenizer {other.tokenizer_digest}, ids as {other.dtype.name}",
                expected=f"the tokenizer of {job.data.key_of(first)}, {one.tokenizer_digest}, ids as {one.dtype.name}",
                remedy="prepare it with that one's tokenizer (`phalanx data prepare --tokenizer FILE`)",
            )


def _require_other_data(job: Job, splits: Mapping[str, Split]) -> None:
    seen: dict[str, str] = {}
    for name, split in splits.items():
        if split.digest in seen:
            raise PhalanxError(
                job.data.key_of(name),
                value=split.url,
                expected=f"other data than that of {job.data.key_of(seen[split.digest])}",
                remedy="give the one source the weight of both",
            )
        seen[split.digest] = name


def sources_of(job: Job, splits: Mapping[str, Split]) -> tuple[Source, ...]:
    """The training sources in their numbered order, each with the order in which it is read."""
    sources, first_shard = [], 0
    for name, split in splits.items():
        store = store_at(job, job.data.training[name].url)
        sources.append(Source(name, store, split, order_of(job, store, split, first_shard), first_shard))
        first_shard += split.num_shards
    return tuple(sources)


def mixture_of(
    job: Job,
    tokens: Mapping[str, int],
    origin: ForkPoint | None = None,
    changes: Iterable[MixtureChange] = (),
) -> Mixture:
    """The mixture that `job` reads by. tokens: of an epoch of each source, by name in their numbered order; origin: of
    a fork; changes: by its journal.

    A stage of the job file sets all weights, a change by the journal those that it names; each holds until the next of
    either kind, at the same position the journal's.
    """
    forked = origin.mixture if origin is not None else None
    if not job.data.is_mixture and forked is None:
        return Mixture()
    names, batch = tuple(tokens), job.training.global_batch_size
    start = forked.start if forked is not None else position_after(origin.step if origin else 0, batch, origin)
    goes_on = forked is not None and bool(forked.weights)
    begins = origin.position if origin is not None else start
    weights, points = _by_job_file(job, origin, begins)
    if forked is not None and goes_on:
        weights = {name: Fraction(forked.weights[name]) for name in names}
    found = [Change(start, tuple(weights[name] for name in names), EXACT_STEPS * batch)]
    points += [(each.position, {name: Fraction(text) for name, text in each.weights}) for each in changes]
    for position, partial in sorted(points, key=lambda point: point[0]):
        weights = {**weights, **partial}
        found.append(Change(position, tuple(weights[name] for name in names), EXACT_STEPS * batch))
    return Mixture(
        found,
        start=start,
        first=[forked.windows.get(name, 0) for name in names] if forked is not None else None,
        limits=[_limit(job, name, count) for name, count in tokens.items()],
    )


Point = tuple[int, Mapping[str, Fraction]]


def _by_job_file(job: Job, origin: ForkPoint | None, begins: int) -> tuple[Mapping[str, Fraction], list[Point]]:
    """The weights at `begins`, and the stages after it as (position, weights)."""
    weights: Mapping[str, Fraction] = {name: exact(each.weight) for name, each in job.data.training.items()}
    points: list[Point] = []
    for stage in sorted(job.data.mixture.values(), key=lambda stage: stage.from_step):
        position = position_after(stage.from_step - 1, job.training.global_batch_size, origin)
        if position <= begins:
            weights = exact_weights(stage.weights)
        else:
            points.append((position, exact_weights(stage.weights)))
    return weights, points


def _limit(job: Job, name: str, epoch_tokens: int) -> Limit:
    source = job.data.training[name]
    if source.epochs is None:
        return Limit()
    return Limit(int(exact(source.epochs) * epoch_tokens / job.training.seq_len), source.when_out == "stop")


class SaysOfPositions(Protocol):
    """What a reading plan says besides its horizon."""

    @property
    def zero_weight(self) -> Spans: ...

    @property
    def mixture(self) -> tuple[MixtureChange, ...]: ...

    @property
    def lost(self) -> LostWindows: ...


@dataclass(frozen=True, slots=True, eq=False)
class JobReading:
    """What a job reads, before its journal says anything. sources: in their numbered order."""

    job: Job
    sources: tuple[Source, ...]
    origin: ForkPoint | None

    @staticmethod
    def of(job: Job, origin: ForkPoint | None, node_folder: Path | None = None) -> JobReading:
        """Opens the sources; node_folder, and what is raised: as for `training_splits`."""
        return JobReading(job, sources_of(job, training_splits(job, node_folder)), origin)

    def mixture(self, changes: Iterable[MixtureChange] = ()) -> Mixture:
        """As the journal's changes have it."""
        tokens = {source.name: source.split.num_tokens for source in self.sources}
        return mixture_of(self.job, tokens, self.origin, changes)

    def view_of(self, plan: SaysOfPositions) -> View:
        """What a reading plan says of positions."""
        number = {source.name: index for index, source in enumerate(self.sources)}
        return View(self.mixture(plan.mixture), plan.zero_weight, {number[name]: spans for name, spans in plan.lost})

    def key_of(self, shard: int, key: str) -> str:
        """How an object of a shard, by its number among all, is called in reports: below the training split, or below
        the source's name where there are several.
        """
        if not self.job.data.is_mixture:
            return key
        return f"{self.sources[int(source_of_shards(self.sources, np.array([shard]))[0])].name}/{key}"

    def last_step(self, mixture: Mixture) -> int | None:
        """The last step for which the sources have windows; None where they have no end."""
        if mixture.end is None:
            return None
        done, position = (self.origin.step, self.origin.position) if self.origin is not None else (0, 0)
        return done + (mixture.end - position) // self.job.training.global_batch_size

    def step_of(self, position: int) -> int:
        """The step that reads a window position."""
        done, first = (self.origin.step, self.origin.position) if self.origin is not None else (0, 0)
        return done + (position - first) // self.job.training.global_batch_size + 1

    def epochs(self, mixture: Mixture, position: int) -> dict[str, float]:
        """Passes over each source before a position, by name."""
        counts = mixture.counts(position)
        return {
            source.name: count * source.order.seq_len / source.order.epoch_tokens
            for source, count in zip(self.sources, counts, strict=True)
        }

    def told_of(self, mixture: Mixture, position: int) -> dict[str, Any]:
        """What people want to know of a change at a position: from which step on which parts hold, and what follows."""
        parts = dict.fromkeys((source.name for source in self.sources), 0.0)
        if mixture.end is None or position < mixture.end:
            weights = zip(self.sources, mixture.weights_at(position), strict=True)
            parts = {source.name: float(weight) for source, weight in weights}
        return {"step": self.step_of(position), "parts": parts, "foretold": list(self.foretold(mixture))}

    def foretold(self, mixture: Mixture) -> tuple[str, ...]:
        """What is known of sources that will have run out before the job's last step, a sentence each."""
        steps, told = self.job.training.steps, []
        last = self.last_step(mixture)
        for out in mixture.ran_out:
            name, step = self.sources[out.source].name, self.step_of(out.position)
            if step <= steps and (last is None or step <= last):
                told.append(f"source {name} runs out at step {step}: the others share its weight from there on")
            elif step <= steps:
                told.append(f"source {name} runs out at step {step}")
        if last is not None and last < steps:
            told.append(f"the run ends after step {last} of {steps}, where its data ends")
        return tuple(told)
