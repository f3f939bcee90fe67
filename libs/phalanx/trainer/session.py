"""Builds what one rank trains with: mesh, model, optimizer, feed, recorder, saver, evaluator, all from the prepared job
and the opening.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from phalanx.core.box import HeldTensor
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject, Lineage, LoaderState, Manifest
from phalanx.lineage.profiles import Profiles
from phalanx.objects import ObjectStore
from phalanx.parallel import Mesh, ParallelModel, build_mesh, multiple_of, parameter_shapes
from phalanx.parallel.replicas import ReplicaLink
from phalanx.snapshot.peers import GlooPeers
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer
from phalanx.spec import Job
from phalanx.stream.manifest import open_split
from phalanx.stream.view import View
from phalanx.stream.windows import MixtureReader, WindowReader
from phalanx.trainer.caching import copies_folder, node_cache
from phalanx.trainer.control import Control, Opening
from phalanx.trainer.evaluator import Evaluator
from phalanx.trainer.expert_figures import HeatPace
from phalanx.trainer.feed import BatchShape, Feed, advanced
from phalanx.trainer.local_updates import NUM_ROUNDS, OUTER_MOMENT
from phalanx.trainer.loss_scale import LossScale
from phalanx.trainer.mixing import JobReading
from phalanx.trainer.optimizer import Optimizer, optimizer_of
from phalanx.trainer.phases import Phases
from phalanx.trainer.places import order_of, store_at
from phalanx.trainer.preflight import Prepared
from phalanx.trainer.profiling import Profiling
from phalanx.trainer.recorder import Recorder
from phalanx.trainer.replicas import Replicas, replicas_of
from phalanx.trainer.replicator import Keeper, Replicator
from phalanx.trainer.saver import Saver, Stamp
from phalanx.trainer.step_times import StepTimes

if TYPE_CHECKING:
    from phalanx.trainer.agent_keeper import MemorySource

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """One rank's training, ready for the step after `step`. start: where the attempt's loader began. not_finite_since:
    the first of the last steps in a row that gave nothing finite.
    """

    prepared: Prepared
    rank: int
    mesh: Mesh
    model: ParallelModel
    optimizer: Optimizer
    replicas: Replicas
    feed: Feed
    recorder: Recorder
    saver: Saver
    evaluator: Evaluator | None
    control: Control
    opening: Opening
    phases: Phases
    report: Callable[..., None]
    step_times: StepTimes
    start: LoaderState
    step: int
    reading: JobReading
    profiling: Profiling
    loss_scale: LossScale
    heat_pace: HeatPace
    replicator: Replicator | None = None
    not_finite_since: int | None = None

    @property
    def last_step(self) -> int:
        """The job's last step, or an earlier one where its data ends, as the journal has it so far."""
        steps, end = self.prepared.job.training.steps, self.reading.last_step(self.feed.view.mixture)
        return steps if end is None else min(steps, end)

    def epochs(self) -> dict[str, float]:
        """Passes over each source so far, by name."""
        return self.reading.epochs(self.feed.view.mixture, loader_state(self).position)

    def state(self) -> list[HeldTensor]:
        """All tensors of a checkpoint, under their stored names."""
        return state_of(self.model, self.optimizer)

    def close(self) -> None:
        """Ends the threads of this rank."""
        self.profiling.close()
        self.feed.close()
        if self.evaluator is not None:
            self.evaluator.close()
        self.control.close()


def state_of(model: ParallelModel, optimizer: Optimizer) -> list[HeldTensor]:
    """Parameters as `model.<name>`, moments as `optim.<name>.<moment>`."""
    return [replace(held, name=f"model.{held.name}") for held in model.parameters()] + optimizer.state()


def reader_of(prepared: Prepared, url: str) -> WindowReader:
    """Reads the windows of the split at `url` in the job's order."""
    job = prepared.job
    store = store_at(job, url)
    split = open_split(store, node_folder=copies_folder(job))
    return WindowReader(
        store, split, order_of(job, store, split), job.data.document_mask, cache=node_cache(job, [split])
    )


def training_reader(job: Job, reading: JobReading) -> MixtureReader:
    """Reads the job's training windows; the feed says by which view."""
    cache = node_cache(job, [source.split for source in reading.sources])
    view = View(reading.mixture())
    return MixtureReader(reading.sources, view, job.data.document_mask, cache=cache, reads_ahead=True)


def build_session(
    prepared: Prepared,
    rank: int,
    device: torch.device,
    control: Control,
    lineage: Lineage,
    store: ObjectStore,
    phases: Phases,
    report: Callable[..., None],
    *,
    reports_step_times: bool = False,
    keeper: MemoryKeeper | None = None,
) -> Session:
    """Opens the attempt and builds the rank; the model holds initial weights, or those of the parent checkpoint."""
    job, layout = prepared.job, prepared.layout
    opening = control.open()
    require_one_attempt(opening.attempt, device)
    require_one_code(prepared.code_digest, device)
    parent = opening.parent
    start = parent.loader if parent is not None else LoaderState(0, 0)
    start_step = start.step
    report("opened", attempt=opening.attempt, step=start_step)
    mesh = build_mesh(layout, device, schedule=job.parallel.schedule)
    model = ParallelModel(job, layout, mesh, device, initialise=parent is None or bool(job.checkpoint.partial))
    link = ReplicaLink(mesh.replica_group)
    optimizer = optimizer_of(job, model.parameters(), link, mesh)
    loss_scale = LossScale(job.training)
    if parent is not None:
        phases.enter("restore", start_step)
        source = keeper.source(store, parent.ref) if keeper is not None else None
        _restore(parent, control, source.store if source is not None else store, job, model, optimizer, report)
        loss_scale.resume(parent.schedule)
        if source is not None:
            told = source.told()
            LOG.info("of %s: %s", parent.ref, ", ".join(f"{name} {value}" for name, value in told.items() if value))
            report("restored", step=start_step, **told)
    shape = _batch_shape(prepared, mesh)
    is_first = rank == 0
    reading = JobReading.of(job, prepared.origin, copies_folder(job))
    recorder = Recorder(
        lineage, opening.attempt, rank, start_step, records_windows=mesh.is_reader, records_steps=is_first
    )
    writer = Writer(store, rank, layout.world_size, deadline_s=job.deadlines.save_s)
    writer.prepare(state_of(model, optimizer))
    return Session(
        prepared=prepared,
        rank=rank,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        replicas=replicas_of(job, link, device, optimizer, model.parameters()),
        feed=Feed(training_reader(job, reading), shape, device, opening.plan, start, reading.view_of),
        recorder=recorder,
        saver=_saver(prepared, opening, control, writer, recorder, lambda: state_of(model, optimizer)),
        evaluator=_evaluator(prepared, model, shape, device),
        control=control,
        opening=opening,
        phases=phases,
        report=report,
        step_times=StepTimes(report if reports_step_times else None),
        start=start,
        step=start_step,
        reading=reading,
        profiling=Profiling(Profiles(store), rank, opening.attempt, device),
        heat_pace=HeatPace(),
        loss_scale=loss_scale,
        replicator=_replicator(job, rank, keeper, lambda: state_of(model, optimizer)),
    )


class MemoryKeeper(Keeper, Protocol):
    """Also what nodes keep of a step that is to be restored."""

    def source(self, storage: ObjectStore, ref: CheckpointRef) -> MemorySource:
        """Where it is restored from: what lies in the memory of this node from there, what other nodes keep from them,
        all else, and what can't be had in memory, from storage.
        """


def _replicator(
    job: Job, rank: int, keeper: MemoryKeeper | None, held: Callable[[], list[HeldTensor]]
) -> Replicator | None:
    if not job.checkpoint.memory_interval:
        return None
    if keeper is None:
        LOG.warning("checkpoint.memory_interval has no effect: no agent keeps anything for this rank")
        return None
    return Replicator(keeper, rank, held, interval=job.checkpoint.memory_interval, deadline_s=job.deadlines.save_s)


def _batch_shape(prepared: Prepared, mesh: Mesh) -> BatchShape:
    job, layout = prepared.job, prepared.layout
    return BatchShape(
        global_batch_size=job.training.global_batch_size,
        local_batch_size=job.parallel.local_batch_size,
        dp=layout.dp,
        dp_rank=mesh.dp_rank,
        multiple_of=multiple_of(job.parallel.schedule, layout.pp),
    )


def _saver(
    prepared: Prepared,
    opening: Opening,
    control: Control,
    writer: Writer,
    recorder: Recorder,
    held: Callable[[], list[HeldTensor]],
) -> Saver:
    job = prepared.job
    stamp = Stamp(
        attempt=opening.attempt,
        world_size=prepared.layout.world_size,
        identity_digest=prepared.identity_digest,
        placement_digest=prepared.placement_digest,
        code_digest=prepared.code_digest,
    )
    return Saver(
        control,
        writer,
        recorder,
        stamp,
        held,
        interval=job.checkpoint.interval,
        when_busy=job.checkpoint.when_busy,
        deadline_s=job.deadlines.save_s,
        start_step=opening.parent.step if opening.parent is not None else 0,
        speculative_interval=job.checkpoint.speculative_interval,
    )


def _evaluator(prepared: Prepared, model: ParallelModel, shape: BatchShape, device: torch.device) -> Evaluator | None:
    job = prepared.job
    if job.data.held_out is None or not job.validation.freq:
        return None
    evaluation = replace(shape, global_batch_size=job.validation.windows)
    return Evaluator(model, reader_of(prepared, job.data.held_out), evaluation, device)


def require_one_attempt(attempt: int, device: torch.device) -> None:
    """All ranks call this together. Raises OutsideError where they hold different attempts: a store that outlived an
    earlier gang gave some of them its answers.
    """
    oldest, newest = _ends(attempt, device)
    if newest != oldest:
        raise OutsideError(f"the ranks hold attempts {oldest} to {newest}; the launcher must start all of them anew")


def require_one_code(digest: str, device: torch.device) -> None:
    """All ranks call this together. Raises PhalanxError where they run different code: under torchrun each runs what
    lies on its own node.
    """
    first, last = _ends(int(digest.rpartition(":")[2][:15], 16), device)  # 60 bits
    if first != last:
        raise PhalanxError(
            "code of the ranks",
            value=digest,
            expected="the same on every rank",
            remedy="put the same version of Phalanx and of the job's own code on every node",
        )


def _ends(value: int, device: torch.device) -> tuple[int, int]:
    """The least and the greatest value of all ranks."""
    ends = torch.tensor([value, -value], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return -int(ends[1]), int(ends[0])


def _restore(
    parent: Manifest,
    control: Control,
    store: ObjectStore,
    job: Job,
    model: ParallelModel,
    optimizer: Optimizer,
    report: Callable[..., None],
) -> None:
    """Fills model and optimizer in place; a tensor that is missing, extra or of another shape is an error."""
    shapes = parameter_shapes(job)
    all_names = [*(f"model.{name}" for name in shapes), *optimizer.state_names(shapes)]
    peers = GlooPeers(job.deadlines.restore_s) if dist.get_world_size() > 1 else None
    try:
        state = state_of(model, optimizer)
        partial = (*left_out_names(job), *_outer_names(job, parent, tuple(shapes)))
        done = restore(store, parent, state, partial, all_names=all_names, peers=peers)
    except DamagedObject as error:
        tell_damage(parent, error, control, report)
        raise
    if peers is not None:
        peers.close()
    if allowed := [name for name in done.left_out if name in left_out_names(job)]:
        LOG.warning("not restored, as checkpoint.partial allows: %s", ", ".join(allowed))
    LOG.info(
        "restored %s: %d tensors, %d bytes from storage, %d from other ranks",
        parent.ref,
        done.num_tensors,
        done.read_bytes,
        done.received_bytes,
    )
    optimizer.resume(parent.schedule)
    if job.gradient_compression.method != "none":
        LOG.warning("what gradient_compression had kept back is in no checkpoint: error feedback begins anew")


def _outer_names(job: Job, parent: Manifest, names: Sequence[str]) -> tuple[str, ...]:
    """Tensors of the outer optimizer where a fork begins, or leaves, training by local updates: it begins with a
    momentum of zero.
    """
    was_local = NUM_ROUNDS in parent.schedule
    return () if was_local == (job.local_updates.steps > 0) else tuple(f"optim.{name}.{OUTER_MOMENT}" for name in names)


def left_out_names(job: Job) -> tuple[str, ...]:
    """The tensors that a restore may leave out, each spelt out."""
    return job.checkpoint.partial_names


def tell_damage(parent: Manifest, damage: DamagedObject, control: Control, report: Callable[..., None]) -> None:
    """Reports the damage, then has it remembered; storage that fails meanwhile must not be told in its place."""
    report("damage", checkpoint=str(parent.ref), why=str(damage))
    try:
        control.refuse_parent(parent, str(damage))
    except OutsideError as error:
        LOG.warning("damage of %s is not in the journal, so the next attempt finds it anew: %s", parent.ref, error)


def loader_state(session: Session) -> LoaderState:
    """Where the loader stands after `session.step`."""
    return advanced(session.start, session.step, session.prepared.job.training.global_batch_size)
