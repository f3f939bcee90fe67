"""The StorageWriter of `torch.distributed.checkpoint`: saves a state dict as a Phalanx checkpoint.

torch's planner decides which rank writes which box and each rank streams its own; the coordinator opens the attempt
(`session`), hands it out with the plans, and commits once every rank has reported its part. Until that commit the
checkpoint does not exist.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from phalanx.core.box import Box
from phalanx.core.digest import digest_of
from phalanx.core.errors import OutsideError, PhalanxError, Problems
from phalanx.lineage import CheckpointRef, LoaderState, Manifest, ObjectRef, journal_digest
from phalanx.objects import StorageSettings
from phalanx.snapshot.arguments import step_of
from phalanx.snapshot.commit import commit
from phalanx.snapshot.dcp.given import name_problem, refused_layout, refused_type, tensor_problem
from phalanx.snapshot.dcp.line import Hold
from phalanx.snapshot.dcp.session import IDENTITY_DIGEST, session_at
from phalanx.snapshot.dcp.steps import step_named
from phalanx.snapshot.dcp.upload import Source, Upload
from phalanx.snapshot.dcp.values import NamePath, Values, encode
from phalanx.snapshot.dtypes import DTYPES
from phalanx.snapshot.grouping import OwnedBox
from phalanx.snapshot.parts import Part

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Share:
    """What the coordinator tells a rank with its plan."""

    attempt: int
    step: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank reports: the attempt it wrote as, and its part."""

    attempt: int
    part: ObjectRef


class PhalanxWriter(StorageWriter, AsyncStager):
    """`dcp.save(state_dict, storage_writer=PhalanxWriter(url, step))`; with `dcp.async_save` also the stager.

    url: root of the checkpoints, `file:///folder` or `s3://bucket/prefix`. step: a whole number that grows from save to
    save; `checkpoint_id` of a call overrides it. deadline_s: within which a rank's upload, and then the commit, must
    end, and twice that the save before it. A writer serves one save at a time.

    Saves are made in the order of the calls, whichever of torch's threads comes first: a save waits for those that were
    called before it. Torch says nothing of the call to a writer beside which it is given another stager; then the order
    in which the writers were made stands for it.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        url: str,
        step: int | None = None,
        *,
        settings: StorageSettings | None = None,
        deadline_s: float = 600,
    ) -> None:
        self._session = session_at(url, settings)
        self._step = None if step is None else step_of(step)
        self._deadline_s = deadline_s
        self._staged_by: DefaultStager | None = None
        # The turns of a save that was staged, and of the one that runs or ran last; what the making stands for.
        self._called: Hold | None = None
        self._running: Hold | None = None
        self._made: tuple[int, int] | None = None
        if step is not None:
            self._made = (threading.get_ident(), self._session.line.next_order())
        self._entered = self._is_coordinator = False
        self._manifest: Manifest | None = None
        self._ref: CheckpointRef | None = None

    @property
    def ref(self) -> CheckpointRef | None:
        """The checkpoint that was written last; it exists once the save has returned."""
        return self._ref

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, in this thread; `checkpoint_id` is its step."""
        if checkpoint_id is not None:
            self._step, self._made = step_named(checkpoint_id), None
        self._enter()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is the number of a step."""
        return str(checkpoint_id).isdecimal()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For `dcp.async_save`: the state dict as it is now, in host memory that the next save uses again. Waits for
        the save before it where this writer makes both; raises OutsideError where that one hangs.
        """
        before = self._called or self._running
        if before is not None:
            self._session.line.wait_for(before.turn, 2 * self._deadline_s)
        staged, self._staged_by = self._session.staging.stage(state_dict)
        self._called = self._session.line.take()
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when all is copied."""

    def close(self) -> None:
        """Staged memory is the process', not this writer's."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Waits for the saves that were called before. Raises PhalanxError where the call's options cannot work,
        OutsideError where one of those saves hangs.
        """
        if self._step is None:
            raise PhalanxError("step", expected="the step to save", remedy="give it: PhalanxWriter(url, step)")
        if not kwargs.get("use_collectives", True):
            raise PhalanxError(
                "use_collectives",
                value=False,
                expected="True: a checkpoint is committed by one rank, once all have written",
                remedy="leave the option out",
            )
        self._is_coordinator = is_coordinator
        running = self._running if self._entered else self._enter()
        assert running is not None, "it was entered"
        self._entered = False
        self._session.line.wait_for_those_before(running.turn, 2 * self._deadline_s)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is. Raises Problems that name every tensor of a name, type or layout that no checkpoint can
        hold.
        """
        tensors = [(item.index.fqn, item.tensor_data.properties) for item in plan.items if item.tensor_data]
        problems = [refused_type(name, found.dtype) for name, found in tensors if _name(found.dtype) not in DTYPES]
        problems += [refused_layout(name, found.layout) for name, found in tensors if found.layout != torch.strided]
        problems += [problem for name in dict(tensors) if (problem := name_problem(name)) is not None]
        if problems:
            raise Problems("state dict", problems)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The coordinator's: each plan with the attempt, step and rank under which it is written."""
        assert self._step is not None, "set_up_storage_writer was called"
        placement = {"writer": "torch.distributed.checkpoint", "torch": torch.__version__, "world_size": len(plans)}
        assert self._running is not None, "set_up_storage_writer was called"
        attempt = self._session.begin(self._step, placement, self._running.turn.order)
        self._manifest = Manifest(
            attempt=attempt.number,
            step=self._step,
            world_size=len(plans),
            identity_digest=IDENTITY_DIGEST,
            placement_digest=digest_of(placement),
            code_digest=attempt.code_digest,
            journal_digest=journal_digest(()),
            loader=LoaderState(self._step, 0),
            schedule={},
            records=(),
            parts=(),
        )
        return [
            replace(plan, storage_data=_Share(attempt.number, self._step, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's boxes and values; the future is done at return."""
        share: _Share = plan.storage_data
        self._ref = CheckpointRef(share.attempt, share.step)
        try:
            values = _values(plan, planner)
            head = Part(share.attempt, share.step, share.rank, share.world_size, (), ())
            sources = [_source(item, planner) for item in plan.items if item.tensor_data is not None]
            kept = [source for source in sources if _is_stored(source.box)]
            part = Upload(self._session.store, head, _numbered(kept), values, self._deadline_s).run()
        except BaseException:
            self._over(share.world_size)
            raise
        finally:
            self._release()
        if not self._is_coordinator:
            self._over(share.world_size)
        written: Future[list[WriteResult]] = Future()
        report = _Written(share.attempt, part)
        written.set_result([WriteResult(MetadataIndex(part.key), part.num_bytes, report)])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The coordinator's: commits. Raises IncompleteCheckpoint where the parts do not make a whole checkpoint."""
        try:
            self._commit(results)
        finally:
            self._over(len(results))

    def _commit(self, results: list[list[WriteResult]]) -> None:
        draft = self._manifest
        assert draft is not None, "prepare_global_plan was called"
        written: list[_Written] = [result.storage_data for rank in results for result in rank]
        strangers = [rank for rank, found in enumerate(written) if found.attempt != draft.attempt]
        if strangers:
            raise OutsideError(
                f"ranks {strangers} wrote as another attempt than {draft.attempt}: they used a plan of an older save "
                "(enable_plan_caching); save again"
            )
        expected = {rank: found.part for rank, found in enumerate(written)}
        commit(self._session.lineage, self._session.store, draft, len(results), self._deadline_s, expected=expected)
        self._session.committed(draft.step)
        _LOG.info("checkpoint %s is committed at %s", draft.ref, self._session.store.url)

    def _enter(self) -> Hold:
        """This thread runs a save: the one that was staged, or one that nothing is known of yet."""
        hold, self._called = self._called, None
        if hold is None:
            made_in, order = self._made or (0, 0)
            in_background = self._made is not None and made_in != threading.get_ident()
            hold = self._session.line.take(order if in_background else None)
        self._made, self._running, self._entered = None, hold, True
        self._session.line.enter(hold.turn)
        return hold

    def _over(self, world_size: int) -> None:
        """Of a save in the background the others may still hear by way of a collective; it is over with its thread."""
        turn = None if self._running is None else self._running.turn
        if turn is not None and (world_size == 1 or turn.taken_by == threading.get_ident()):
            turn.end()

    def _release(self) -> None:
        """Hands staged memory back: everything in it is stored, or never will be."""
        stager, self._staged_by = self._staged_by, None
        if stager is not None:
            self._session.staging.give_back(stager)

    def __getstate__(self) -> NoReturn:
        self._called = None  # that save never runs
        raise PhalanxError(
            "PhalanxWriter in another process",
            expected="AsyncCheckpointerType.THREAD: an attempt belongs to the process that opened it",
            remedy="leave async_checkpointer_type out, or use phalanx.snapshot.dcp.async_save",
        )


def _values(plan: SavePlan, planner: SavePlanner) -> bytes | None:
    """The content of this rank's values object: what of its plan is no tensor, and where all of it lies."""
    names = [item.index for item in plan.items if item.type == WriteItemType.BYTE_IO]
    lookup = getattr(planner, "lookup_object", None)
    if names and lookup is None:
        raise PhalanxError(
            f"planner {type(planner).__name__}",
            expected="one with lookup_object, as DefaultSavePlanner has it: values are stored as JSON, not pickled",
            remedy="derive it from DefaultSavePlanner, or give a state dict of tensors alone",
        )
    values = {index.fqn: lookup(index) for index in names} if lookup is not None else {}
    paths = _paths(plan)
    return encode(Values(values, paths)) if values or paths else None


def _paths(plan: SavePlan) -> Mapping[str, NamePath]:
    """Places in the nested state dict, of those names of the plan that are not at its top."""
    mappings = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    names = {item.index.fqn for item in plan.items}
    return {name: tuple(path) for name, path in mappings.items() if name in names and tuple(path) != (name,)}


def _source(item: WriteItem, planner: SavePlanner) -> Source:
    data, tensor = item.tensor_data, planner.resolve_data(item)
    assert data is not None and isinstance(tensor, torch.Tensor), item
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if (problem := tensor_problem(item.index.fqn, tensor)) is not None:
        raise problem
    if _name(tensor.dtype) not in DTYPES:
        raise refused_type(item.index.fqn, tensor.dtype)
    if tuple(tensor.shape) != box.shape:
        raise PhalanxError(
            item.index.fqn,
            value=f"a local tensor of the shape {list(tensor.shape)}",
            expected=f"the shape {list(box.shape)} that its placement promises",
            remedy="build the DTensor with its global shape and stride",
        )
    return Source(OwnedBox(item.index.fqn, _name(tensor.dtype), tuple(data.size), box, 0), tensor)


def _numbered(sources: Sequence[Source]) -> list[Source]:
    return [replace(source, box=replace(source.box, index=number)) for number, source in enumerate(sources)]


def _is_stored(box: OwnedBox) -> bool:
    """An empty box is written only for a tensor that has no elements at all, so that its type is not lost."""
    return box.box.num_elements > 0 or 0 in box.global_shape


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
