"""`phalanx checkpoint import` itself: from a source and a job to a checkpoint with which the job begins.

An import is the first attempt of the job (`beginning`); its one checkpoint holds what was imported. The order is that
of a fork: the job, the attempt, objects, the part, the manifest. Killed anywhere and run again it goes on with
what is there; before the manifest is there, the job's record says from where it begins, so no run starts from nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from phalanx.checkpoint.importing.beginning import (
    manifest_of,
    opened_attempt,
    origin_of,
    placement_of,
    require_beginning,
)
from phalanx.checkpoint.importing.hugging_face import read_hugging_face
from phalanx.checkpoint.importing.mapping import ImportPlan, MappedTensor, Rotary, planned
from phalanx.checkpoint.importing.reading import located_plan, num_updates, require_same_values, source_step
from phalanx.checkpoint.importing.source import Source
from phalanx.checkpoint.importing.torch_dcp import METADATA, read_torch_dcp
from phalanx.checkpoint.importing.values import num_bytes
from phalanx.checkpoint.importing.writing import Importer
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.models.args import DecoderArgs
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.snapshot.arguments import step_of
from phalanx.snapshot.commit import commit
from phalanx.snapshot.fork import IMPORT_ATTEMPT, imported
from phalanx.spec import Job
from phalanx.spec.job import plain
from phalanx.trainer.code import code_digest, own_code
from phalanx.trainer.mixing import training_splits
from phalanx.trainer.places import job_store, store_at
from phalanx.trainer.preflight import identity_of

_COMMIT_S: Final = 600.0


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
        step_of(options.step, "--step", "give the optimizer step at which the job is to begin")
        if not url.strip():
            raise PhalanxError(
                "SOURCE", value=url, expected="a folder or its URL", remedy="name what is to be imported"
            )
        args = _decoder(job)
        self._job, self._options = job, options
        self.source = open_source(job, url, counters=options.with_optimizer)
        with_optimizer = options.with_optimizer and self.source.kind == "torch-dcp"
        plan = planned(
            self.source, args, rotary=options.rotary, with_optimizer=with_optimizer, leave_out=options.leave_out
        )
        self.plan = located_plan(self.source, plan)
        self.num_updates = num_updates(self.source, self.plan)
        self._source_step = source_step(self.source)

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
        require_same_values(self.source, self.plan)
        splits = training_splits(job)
        identity_digest = job.identity_digest({name: split.digest for name, split in splits.items()})
        lineage, origin = Lineage(store), origin_of(self.source, self.plan, self._options.step)
        placement = placement_of(self.source, self.plan, origin)
        require_beginning(store, lineage, origin, placement)
        lineage.create_job(
            request_id=uuid.uuid4().hex,
            spec=plain(job),
            identity=identity_of(job, splits),
            identity_digest=identity_digest,
            origin=origin,
        )
        code = code_digest(*own_code(job))
        attempt = opened_attempt(lineage, store, origin, placement, code, identity_digest)
        ref = CheckpointRef(IMPORT_ATTEMPT, origin.step)
        was_there = imported(lineage, origin)
        if not was_there:
            Importer(self.source.store, store, ref, self.plan.tensors, progress).run()
            commit(lineage, store, manifest_of(attempt, ref, self.num_updates), 1, _COMMIT_S)
        return self._report(store, ref, was_there)

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


def open_source(job: Job, text: str, *, counters: bool = True) -> Source:
    """The source at a path or URL, reached as the job's `[storage]` says; PhalanxError where it is none. counters: see
    `read_torch_dcp`.
    """
    url = text.rstrip("/") if "://" in text else Path(text).absolute().as_uri()
    store = store_at(job, url)
    try:
        store.info(METADATA)
    except ObjectMissing:
        return read_hugging_face(store, url)
    return read_torch_dcp(store, url, counters=counters)


def _decoder(job: Job) -> DecoderArgs:
    if job.model.class_ is not None:
        raise PhalanxError(
            "model.class",
            value=job.model.class_,
            expected="the built-in decoder, whose names others know",
            remedy="for a model of your own, load with torch and save with phalanx.snapshot.dcp.PhalanxWriter",
        )
    if job.optimizer.name != "adamw":
        raise PhalanxError(
            "optimizer.name",
            value=job.optimizer.name,
            expected="adamw, as what is imported begins with AdamW's state",
            remedy="set it to adamw, or begin anew",
        )
    return DecoderArgs.of(job.model.decoder)


def names_shown(plan: ImportPlan) -> Collection[tuple[str, str]]:
    """Pairs (name in the checkpoint, what it is made of), for people."""
    return [
        (each.name, "zeros" if each.source is None else f"{each.source.name} ({each.source.dtype}{_reordered(each)})")
        for each in plan.tensors
    ]


def _reordered(tensor: MappedTensor) -> str:
    return ", rows of heads reordered" if tensor.head_dim is not None else ""
