"""`phalanx checkpoint import` itself: from a source and a job to a checkpoint with which the job begins.

An import is the first attempt of the job, which trains nothing; its one checkpoint holds what was imported. The order
is that of a fork: the job, the attempt, objects, the part, the manifest. Killed anywhere and run again it goes on with
what is there; before the manifest is there, the job's record says from where it begins, so no run starts from nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from phalanx.checkpoint.importing.hugging_face import read_hugging_face
from phalanx.checkpoint.importing.mapping import ImportPlan, MappedTensor, Rotary, planned
from phalanx.checkpoint.importing.source import Source, read_rows, row_ranges
from phalanx.checkpoint.importing.torch_dcp import METADATA, located, read_torch_dcp
from phalanx.checkpoint.importing.values import num_bytes
from phalanx.checkpoint.importing.writing import Importer
from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, DamagedObject, ForkPoint, Lineage, LoaderState, Manifest, keys
from phalanx.lineage.encoding import encode
from phalanx.lineage.journal import journal_digest
from phalanx.models.args import DecoderArgs
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.snapshot.commit import commit
from phalanx.snapshot.fork import IMPORT_ATTEMPT, imported
from phalanx.spec import Job
from phalanx.spec.job import plain
from phalanx.trainer.code import code_digest
from phalanx.trainer.mixing import training_splits
from phalanx.trainer.places import job_store, store_at
from phalanx.trainer.preflight import identity_of

PROJECT: Final = "@import"  # no project can be called so
_COMMIT_S: Final = 600.0
_STEP: Final = "train_state.step"


@dataclass(frozen=True, slots=True)
class Options:
    """What a user says of an import; see `planned` for the first three. step: the step at which the job begins."""

    rotary: Rotary | None = None
    with_optimizer: bool = True
    leave_out: tuple[str, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did. was_there: an earlier start had finished it."""

    job: str
    attempt: int
    step: int
    source: str
    source_kind: str
    source_digest: str
    num_tensors: int
    num_bytes: int
    num_updates: int
    rotary: str
    optimizer: str
    left_out: tuple[str, ...]
    was_there: bool


class Import:
    """An import that is planned: everything about names, shapes and types is checked, nothing is written yet.

    Raises PhalanxError (Problems, of everything at once) for what the user must change.
    """

    def __init__(self, job: Job, url: str, options: Options = Options()) -> None:
        args = _decoder(job)
        self._job, self._options = job, options
        self.source = open_source(job, url)
        with_optimizer = options.with_optimizer and self.source.kind == "torch-dcp"
        plan = planned(
            self.source, args, rotary=options.rotary, with_optimizer=with_optimizer, leave_out=options.leave_out
        )
        self.plan = _located(self.source, plan)
        self.num_updates = _num_updates(self.source, self.plan)
        self._source_step = _source_step(self.source)

    @property
    def source_step(self) -> int | None:
        """The step that the source says it had reached (torchtitan's train_state.step); None where it doesn't say."""
        return self._source_step

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors in the checkpoint."""
        return sum(map(num_bytes, self.plan.tensors))

    def run(
        self, progress: Callable[[int], None] = lambda _: None, *, target: ObjectStore | None = None
    ) -> ImportReport:
        """Makes the checkpoint; does nothing where that is done. progress: hears the bytes of tensors that are done.

        target: the job's store, for tests. Raises PhalanxError where the job has begun in another way.
        """
        job, store = self._job, target if target is not None else job_store(self._job)
        _require_same_values(self.source, self.plan)
        splits = training_splits(job)
        identity_digest = job.identity_digest({name: split.digest for name, split in splits.items()})
        lineage, origin = Lineage(store), self._origin()
        _require_beginning(store, lineage, origin)
        lineage.create_job(
            request_id=uuid.uuid4().hex,
            spec=plain(job),
            identity=identity_of(job, splits),
            identity_digest=identity_digest,
            origin=origin,
        )
        attempt = self._opened(lineage, store, origin, identity_digest)
        ref = CheckpointRef(IMPORT_ATTEMPT, origin.step)
        was_there = imported(lineage, origin)
        if not was_there:
            Importer(self.source.store, store, ref, self.plan.tensors, progress).run()
            commit(lineage, store, self._draft(attempt, ref), 1, _COMMIT_S)
        return self._report(store, ref, was_there)

    def _origin(self) -> ForkPoint:
        """Names the source where a fork names its origin: steps and windows of this job count from here."""
        facts = {
            "source": self.source.digest,
            "rotary": self.plan.rotary,
            "with_optimizer": self.plan.with_optimizer,
            "left_out": list(self.plan.left_out),
        }
        uid = f"{self.source.kind}-{digest_of(facts).removeprefix('sha256:')[:32]}"
        return ForkPoint(PROJECT, uid, IMPORT_ATTEMPT, self._options.step, 0)

    def _opened(self, lineage: Lineage, store: ObjectStore, origin: ForkPoint, identity_digest: str) -> Attempt:
        """The first attempt; its placement says what was imported, and from where."""
        said = {"kind": self.source.kind, "url": self.source.url, "digest": self.source.digest}
        placement = {"import": {**origin.plain(), "source": {**said, "rotary": self.plan.rotary}}}
        code = code_digest(self._job.model.class_)
        attempt = Attempt(
            IMPORT_ATTEMPT, None, (), journal_digest(()), code, identity_digest, placement, f"import of {origin.uid}"
        )
        there = lineage.attempts()
        if there:
            return _same(there[0], attempt, store)
        try:
            lineage.put(keys.attempt(IMPORT_ATTEMPT), encode(attempt))
        except DamagedObject:  # another process was faster
            return _same(lineage.attempts()[0], attempt, store)
        return attempt

    def _draft(self, attempt: Attempt, ref: CheckpointRef) -> Manifest:
        return Manifest(
            attempt=ref.attempt,
            step=ref.step,
            world_size=1,
            identity_digest=attempt.identity_digest,
            placement_digest=digest_of(attempt.placement),
            code_digest=attempt.code_digest,
            journal_digest=journal_digest(()),
            loader=LoaderState(ref.step, 0),
            schedule={"num_updates": self.num_updates},
            records=(),
            parts=(),
        )

    def _report(self, store: ObjectStore, ref: CheckpointRef, was_there: bool) -> ImportReport:
        return ImportReport(
            job=store.url,
            attempt=ref.attempt,
            step=ref.step,
            source=self.source.url,
            source_kind=self.source.kind,
            source_digest=self.source.digest,
            num_tensors=len(self.plan.tensors),
            num_bytes=self.num_bytes,
            num_updates=self.num_updates,
            rotary=self.plan.rotary,
            optimizer="imported" if self.plan.with_optimizer else "begins anew",
            left_out=self.plan.left_out,
            was_there=was_there,
        )


def open_source(job: Job, text: str) -> Source:
    """The source at a path or URL, reached as the job's `[storage]` says; PhalanxError where it is none."""
    url = text.rstrip("/") if "://" in text else Path(text).absolute().as_uri()
    store = store_at(job, url)
    try:
        store.info(METADATA)
    except ObjectMissing:
        return read_hugging_face(store, url)
    return read_torch_dcp(store, url)


def _decoder(job: Job) -> DecoderArgs:
    if job.model.class_ is not None:
        raise PhalanxError(
            "model.class",
            value=job.model.class_,
            expected="the built-in decoder, whose names others know",
            remedy="for a model of your own, load with torch and save with phalanx.snapshot.dcp.PhalanxWriter",
        )
    if job.model.decoder.moe is not None:
        raise PhalanxError(
            "model.args.moe", expected="a dense decoder", remedy="a mixture of experts can't be imported yet"
        )
    return DecoderArgs.of(job.model.decoder)


def _located(source: Source, plan: ImportPlan) -> ImportPlan:
    """The plan with its tensors where their values begin, which of archives is to be found out."""
    if source.kind != "torch-dcp":
        return plan
    used = [
        *(each.source for each in plan.tensors if each.source),
        *plan.steps,
        *(t for pair in plan.same for t in pair),
    ]
    found = located(source, dict.fromkeys(each.name for each in used))

    def moved(tensor: MappedTensor) -> MappedTensor:
        return tensor if tensor.source is None else dataclasses.replace(tensor, source=found[tensor.source.name])

    return dataclasses.replace(
        plan,
        tensors=tuple(map(moved, plan.tensors)),
        steps=tuple(found[each.name] for each in plan.steps),
        same=tuple((found[one.name], found[other.name]) for one, other in plan.same),
    )


def _num_updates(source: Source, plan: ImportPlan) -> int:
    """How often the optimizer has updated the weights: one number for all parameters, as AdamW here has."""
    counts = {float(read_rows(source.store, each, range(1))): each.name for each in plan.steps}
    if len(counts) > 1 or any(count < 0 or not count.is_integer() for count in counts):
        raise PhalanxError(
            f"optimizer of {source.url}",
            value=", ".join(f"{name}: {count:g}" for count, name in counts.items()),
            expected="one number of updates for all parameters",
            remedy="import it with --without-optimizer: AdamW then begins anew",
        )
    return int(next(iter(counts), 0))


def _source_step(source: Source) -> int | None:
    tensor = source.tensors.get(_STEP)
    if tensor is None or tensor.shape or source.kind != "torch-dcp":
        return None
    return int(read_rows(source.store, located(source, [_STEP])[_STEP], range(1)))


def _require_same_values(source: Source, plan: ImportPlan) -> None:
    for one, other in plan.same:
        for rows in row_ranges(one):
            values = [read_rows(source.store, each, rows) for each in (one, other)]
            if one.dtype != other.dtype or not np.array_equal(values[0].view(np.uint8), values[1].view(np.uint8)):
                raise PhalanxError(
                    one.name,
                    expected=f"the values of {other.name}, since the job's model.args.tie_embeddings is true",
                    remedy="set it to false, or leave the head out by --leave-out",
                )


def _require_beginning(store: ObjectStore, lineage: Lineage, origin: ForkPoint) -> None:
    """The job must be new, or this very import of it have begun."""
    record = lineage.read_job()
    if record is None or record.origin == origin:
        return
    begun = "a job that began otherwise" if record.origin is None else f"a job that began with {record.origin}"
    raise PhalanxError(
        f"job at {store.url}",
        value=begun,
        expected="a new job, or one for which this same import of the same source was begun",
        remedy="give the job another [job] name",
    )


def _same(found: Attempt, wanted: Attempt, store: ObjectStore) -> Attempt:
    """The attempt that is there, if it is that of this import; where the source lay then does not matter."""

    def essence(attempt: Attempt) -> tuple[object, str]:
        said: Mapping[str, Any] = attempt.placement.get("import", {})
        return {name: value for name, value in said.items() if name != "source"}, attempt.identity_digest

    if essence(found) != essence(wanted):
        raise PhalanxError(
            f"job at {store.url}",
            expected="one whose first attempt is this import",
            remedy="give the job another [job] name",
        )
    return found


def names_shown(plan: ImportPlan) -> Collection[tuple[str, str]]:
    """Pairs (name in the checkpoint, what it is made of), for people."""
    return [
        (each.name, "zeros" if each.source is None else f"{each.source.name} ({each.source.dtype}{_reordered(each)})")
        for each in plan.tensors
    ]


def _reordered(tensor: MappedTensor) -> str:
    return ", rows of heads reordered" if tensor.head_dim is not None else ""
