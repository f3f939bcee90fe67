"""What can be known to be wrong before a rank starts: data, vocabulary, model class, storage, identity. No torch unless
a class asks for it.

Everything found is a PhalanxError, as `phalanx.spec` raises for values. The result is all that ranks need, in plain
JSON.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError
from phalanx.lineage import (
    CheckpointRef,
    DamagedObject,
    ForkedMixture,
    ForkPoint,
    JobRecord,
    Lineage,
)
from phalanx.lineage.plan import mixture_changes
from phalanx.planner.automatic import choose
from phalanx.snapshot.fork import import_checkpoint
from phalanx.spec import Job, Layout, parse_job
from phalanx.spec.changes import require_forkable
from phalanx.spec.job import plain
from phalanx.spec.network import disagreements
from phalanx.spec.unbuilt import refuse_unbuilt
from phalanx.stream.manifest import Split, open_split
from phalanx.trainer.caching import copies_folder, node_cache
from phalanx.trainer.code import code_digest, own_code
from phalanx.trainer.forking import forked_mixture
from phalanx.trainer.mixing import JobReading, sources_of, training_splits
from phalanx.trainer.offload import check_offload
from phalanx.trainer.own_checks import check_own
from phalanx.trainer.places import job_store, store_at
from phalanx.trainer.promise import warnings_of
from phalanx.trainer.shipping import carry_code, enter_code, with_code


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that may start: its layout, what its data is, and under which digests it goes. origin: of a fork. chosen:
    what the planner laid out and why, in one line, where the job left that to it. on_disk: what its optimizer state
    takes there, in one line, where it does.
    """

    job: Job
    layout: Layout
    identity_digest: str
    placement_digest: str
    code_digest: str
    warnings: tuple[str, ...] = ()
    origin: ForkPoint | None = None
    chosen: str = ""
    on_disk: str = ""

    @property
    def said(self) -> tuple[str, ...]:
        """What is told before a run starts, a line each."""
        return tuple(line for line in (self.chosen, self.on_disk) if line)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a job is forked from: another job, and the attempt and step of a checkpoint of it."""

    job: Job
    attempt: int
    step: int

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Origin:
        """fields: `spec` (the other job's file, resolved), `attempt`, `step`."""
        return Origin(parse_job(fields["spec"], where="job of the origin"), int(fields["attempt"]), int(fields["step"]))


def prepare(
    job: Job,
    world_size: int,
    *,
    is_first: bool = True,
    origin: Origin | None = None,
    ranks_per_node: int | None = None,
) -> Prepared:
    """Checks everything and creates the job in storage, or continues the one that is there. `warnings`: what is true of
    the storage and must be told.

    is_first: where several processes prepare one job, one of them alone tries the storage. origin: of a fork; its
    checkpoint is copied, unless that is done, so a process that is killed meanwhile is simply run again.
    ranks_per_node: where it is another number than the job's. The job of the result states the layout that was chosen.
    Raises PhalanxError (or Problems) for whatever the user must change, StoreError where storage does not answer.
    """
    chosen = choose(job, world_size, gpus_per_node=ranks_per_node)
    job = chosen.job
    layout = job.layout(world_size)
    refuse_unbuilt(job, layout)
    _check_float8(job)
    if origin is not None:
        require_forkable(origin.job, job)
    splits = training_splits(job, copies_folder(job))
    node_cache(job, splits.values())
    split = next(iter(splits.values()))
    _check_held_out(job, split)
    _check_vocabulary(job, split)
    _check_device(job)
    _check_folders(job)
    if origin is not None:
        carry_code(origin.job, job)
    job, told = with_code(job)
    enter_code(job)
    check_own(job, layout, split.vocab_size)
    on_disk = check_offload(job, layout)
    identity_digest = job.identity_digest({name: each.digest for name, each in splits.items()})
    warnings = (*told, *warnings_of(job_store(job))) if is_first else ()
    code = code_digest(*own_code(job))
    point = None if origin is None else _fork_point(job, splits, origin)
    record = _create_job(job, identity_digest, splits, point)
    if is_first:
        warnings += (*_foretold(job, splits, record.origin), *_overruled(job))
    if origin is not None and point is not None:
        import_checkpoint(
            job_store(origin.job), job_store(job), point, code_digest=code, identity_digest=identity_digest
        )
    return Prepared(
        job=job,
        layout=layout,
        identity_digest=identity_digest,
        placement_digest=digest_of(job.placement(world_size)),
        code_digest=code,
        warnings=warnings,
        origin=record.origin,
        chosen=chosen.said,
        on_disk=on_disk,
    )


def _foretold(job: Job, splits: Mapping[str, Split], origin: ForkPoint | None) -> tuple[str, ...]:
    """Which sources will run out, by the job file and what the journal says so far."""
    if not job.data.is_mixture:
        return ()
    lineage = Lineage(job_store(job))
    newest = lineage.newest_attempt()
    entries = lineage.journal(newest.number) if newest is not None else ()
    reading = JobReading(job, sources_of(job, splits), origin)
    return reading.foretold(reading.mixture(mixture_changes(entries)))


def _overruled(job: Job) -> tuple[str, ...]:
    """What this process's environment says of the network otherwise than the job file."""
    return disagreements(job.cluster.network, os.environ) if job.cluster.device == "cuda" else ()


def _check_device(job: Job) -> None:
    """CUDA is asked for only where the job wants it: that imports torch."""
    if job.cluster.device != "cuda":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < job.cluster.nproc:
        raise PhalanxError(
            "cluster.device",
            value="cuda",
            expected=f"{job.cluster.nproc} GPUs on this machine (cluster.nproc), where torch finds {found}",
            remedy='lower cluster.nproc, set cluster.device = "cpu", or install a torch built for this machine\'s GPUs',
        )


def _check_float8(job: Job) -> None:
    if job.training.float8_recipe != "none" and importlib.util.find_spec("torchao") is None:
        raise PhalanxError(
            "training.float8_recipe",
            value=job.training.float8_recipe,
            expected="none, or the library torchao",
            remedy="install phalanx[fp8], or remove the key (that is another run)",
        )


def _check_folders(job: Job) -> None:
    """Storage must outlive the ranks, and the folder for logs must be one that can be written."""
    if job.job.storage.startswith("memory:"):
        raise PhalanxError(
            "job.storage",
            value=job.job.storage,
            expected="storage that all ranks share and that outlives them",
            remedy="name a folder (file:///...) or a bucket (s3://...)",
        )
    folder = Path(job.metrics.folder).absolute() / job.job.name
    existing = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise PhalanxError(
            "metrics.folder",
            value=job.metrics.folder,
            expected="a folder that can be written",
            remedy="name another one: logs of the ranks and metrics go there",
        )


def _fork_point(job: Job, splits: Mapping[str, Split], origin: Origin) -> ForkPoint:
    """The checkpoint that is copied. Where the job knows it already, the other job need not have it any more."""
    name, ref = origin.job.job, CheckpointRef(origin.attempt, origin.step)
    stored = Lineage(job_store(job)).read_job()
    if stored is not None and stored.origin is not None:
        known = stored.origin
        if (known.project, known.uid, known.attempt, known.step) == (name.project, name.name, ref.attempt, ref.step):
            return known
    lineage = Lineage(job_store(origin.job))
    try:
        manifest = lineage.manifest(ref)
        mixture = forked_mixture(job, splits, origin.job, lineage, manifest)
    except DamagedObject as error:
        raise PhalanxError(
            f"checkpoint {ref} of projects/{name.project}/jobs/{name.name}",
            expected=f"one that can be copied: {error}",
            remedy="fork from another checkpoint (`phalanx checkpoint list`)",
        ) from error
    return ForkPoint(name.project, name.name, ref.attempt, ref.step, manifest.loader.position, mixture)


def identity_of(job: Job, splits: Mapping[str, Split]) -> dict[str, Any]:
    """What is stored of a job's identity, to name what differs from it. splits: of its training sources, by name."""
    split = next(iter(splits.values()))
    return {
        **job.identity(),
        "data_digests": {name: each.digest for name, each in splits.items()},
        # Follows from the data digest; kept so that an export can check a tokenizer when the data is gone.
        "tokenizer": {"digest": split.tokenizer_digest, "eos_id": split.eos_id},
    }


def _create_job(job: Job, identity_digest: str, splits: Mapping[str, Split], origin: ForkPoint | None) -> JobRecord:
    return Lineage(job_store(job)).create_job(
        request_id=uuid.uuid4().hex,
        spec=plain(job),
        identity=identity_of(job, splits),
        identity_digest=identity_digest,
        origin=origin,
    )


def _split(job: Job, key: str, url: str) -> Split:
    """The split at `url`; what is wrong with it is told with the key that names it."""
    try:
        return open_split(store_at(job, url), node_folder=copies_folder(job))
    except PhalanxError as error:
        raise PhalanxError(
            f"{key} at {error.where}", value=error.value, expected=error.expected, remedy=error.remedy
        ) from error


def _check_held_out(job: Job, train: Split) -> None:
    """Only where the job evaluates: otherwise the key has no effect."""
    if not job.validation.freq:
        return
    if job.data.held_out is None:
        raise PhalanxError(
            "data.held_out",
            expected="the URL of a held-out split, since validation.freq is set",
            remedy="name the held_out folder that `phalanx data prepare` wrote, or set validation.freq = 0",
        )
    held_out = _split(job, "data.held_out", job.data.held_out)
    if not held_out.is_held_out:
        raise PhalanxError(
            "data.held_out",
            value=job.data.held_out,
            expected="a split that was held out at preparation",
            remedy="name the held_out folder that lies beside the training split",
        )
    if job.data.held_out_digest not in (None, held_out.digest):
        raise PhalanxError(
            "data.held_out_digest",
            value=job.data.held_out_digest,
            expected=f"the digest of the split at {job.data.held_out}, {held_out.digest}",
            remedy="correct the URL or the digest",
        )
    if held_out.tokenizer_digest != train.tokenizer_digest:
        raise PhalanxError(
            "data.held_out",
            value=job.data.held_out,
            expected="a split made with the tokenizer of the training split",
            remedy="prepare both splits together",
        )


def _check_vocabulary(job: Job, split: Split) -> None:
    args: Any = job.model.args
    vocab_size = args.get("vocab_size") if isinstance(args, dict) else args.vocab_size
    if isinstance(vocab_size, int) and vocab_size < split.vocab_size:
        raise PhalanxError(
            "model.args.vocab_size",
            value=vocab_size,
            expected=f"at least the tokenizer's {split.vocab_size} tokens",
            remedy=f"set it to {split.vocab_size} or more, or prepare the data with a smaller tokenizer",
        )


def to_arguments(prepared: Prepared) -> dict[str, Any]:
    """`prepared` as the plain JSON that a rank is started with."""
    return {**asdict(prepared), "job": plain(prepared.job)}


def from_arguments(arguments: Mapping[str, Any]) -> Prepared:
    """The inverse of `to_arguments`."""
    # An attempt that an earlier version prepared lacks what is newer.
    fields = {
        "chosen": "",
        "on_disk": "",
        **{name: arguments[name] for name in Prepared.__dataclass_fields__ if name in arguments},
    }
    fields |= {"job": parse_job(arguments["job"]), "layout": Layout(**arguments["layout"])}
    return Prepared(**{**fields, "warnings": tuple(arguments["warnings"]), "origin": _origin(arguments["origin"])})


def _origin(fields: Mapping[str, Any] | None) -> ForkPoint | None:
    if fields is None:
        return None
    mixture = fields["mixture"]
    return ForkPoint(**{**fields, "mixture": None if mixture is None else ForkedMixture(**mixture)})
