"""Save and load in one line each. All ranks of a program call them together, as `dcp.save` and `dcp.load`."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef
from phalanx.objects import StorageSettings
from phalanx.snapshot.arguments import names_of, step_of
from phalanx.snapshot.dcp.agreed import agreed
from phalanx.snapshot.dcp.failures import told_plainly
from phalanx.snapshot.dcp.given import require_dict, require_storable
from phalanx.snapshot.dcp.groups import own_group
from phalanx.snapshot.dcp.planner import CheckedPlanner, CheckedSavePlanner
from phalanx.snapshot.dcp.reader import PhalanxReader
from phalanx.snapshot.dcp.saving import Saving, flight
from phalanx.snapshot.dcp.session import session_at
from phalanx.snapshot.dcp.writer import PhalanxWriter
from phalanx.snapshot.errors import DamagedCheckpoint


def save(
    state_dict: dict[str, Any],
    url: str,
    *,
    step: int,
    process_group: dist.ProcessGroup | None = None,
    settings: StorageSettings | None = None,
    deadline_s: float = 600,
) -> CheckpointRef:
    """Saves `state_dict` as the checkpoint of `step` below `url`; it exists at return.

    state_dict: as for `dcp.save`: tensors, DTensors, nested dicts and lists, modules, optimizers, numbers, texts.
    step: an int, or an integer of numpy's; greater than that of the checkpoint that the program began from.
    process_group: ranks that save together, all by default. deadline_s: for a rank's upload, and for the commit. Raises
    PhalanxError where something of this cannot be saved (nothing exists then), OutsideError where storage or another
    rank fails, and first what a background save failed with that nobody has seen.
    """

    def made() -> PhalanxWriter:
        require_dict(state_dict)
        return PhalanxWriter(url, step_of(step), settings=settings, deadline_s=deadline_s)

    group = own_group("save", process_group, deadline_s)
    flight.finish(group)  # until then a background save speaks on this group
    writer = agreed(made, group)
    with told_plainly():
        state_dict_saver.save(state_dict, storage_writer=writer, planner=CheckedSavePlanner(), process_group=group)
    assert writer.ref is not None, "it was written"
    return writer.ref


def async_save(
    state_dict: dict[str, Any],
    url: str,
    *,
    step: int,
    process_group: dist.ProcessGroup | None = None,
    settings: StorageSettings | None = None,
    deadline_s: float = 600,
) -> Saving:
    """As `save`, but returns once every value is copied to host memory; the rest goes on in the background.

    Waits for the background save before it, and raises its failure unless `Saving.result` has.
    """

    def made() -> PhalanxWriter:
        require_dict(state_dict)
        return _HelpersWriter(url, step_of(step), settings=settings, deadline_s=deadline_s)

    group = own_group("save", process_group, deadline_s)
    flight.finish(group)  # until then a background save speaks on this group
    writer = agreed(made, group)
    future = state_dict_saver.async_save(
        state_dict, storage_writer=writer, planner=CheckedSavePlanner(), process_group=group
    )
    assert isinstance(future, Future), "it was staged at once"
    saving = Saving(step_of(step), writer, future)
    flight.begin(saving)
    return saving


def load(
    state_dict: dict[str, Any],
    url: str,
    step: int | None = None,
    *,
    partial: Collection[str] = (),
    process_group: dist.ProcessGroup | None = None,
    settings: StorageSettings | None = None,
    deadline_s: float = 600,
) -> CheckpointRef:
    """Fills `state_dict` in place from the checkpoint of `step`, the newest if None, whatever layout wrote it.

    Of what the checkpoint holds only what lies below the keys of `state_dict` is read. partial: a list of names
    (as `phalanx checkpoint show` lists them) that may be missing on either side. Raises PhalanxError where there is no
    such checkpoint, Problems that name everything missing, extra or of another type or shape before anything is read,
    and DamagedCheckpoint, naming object and tensor, where a byte is not what was saved; don't go on with the state
    then.
    """

    def made() -> tuple[PhalanxReader, CheckedPlanner]:
        require_dict(state_dict)
        return _HelpersReader(url, step, settings=settings), CheckedPlanner(names_of("partial", partial))

    group = own_group("load", process_group, deadline_s)
    reader, planner = agreed(made, group)
    try:
        with told_plainly():
            state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, process_group=group)
    except DamagedCheckpoint as error:
        _note_older(error, url, settings)
        raise
    assert reader.ref is not None, "it was read"
    return reader.ref


def latest_step(url: str, *, settings: StorageSettings | None = None) -> int | None:
    """The step of the newest checkpoint below `url`; None where there is none."""
    live = session_at(url, settings).lineage.checkpoints()
    return max(live).step if live else None


class _HelpersWriter(PhalanxWriter):
    """What cannot be saved is not staged either: staging it would fail on this rank alone, so it is raised with the
    plan, where all ranks hear it.
    """

    _failure: PhalanxError | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        try:
            require_storable(state_dict)
        except PhalanxError as error:
            self._failure, state_dict = error, {}
        return super().stage(state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return super().prepare_local_plan(plan)


class _HelpersReader(PhalanxReader):
    """Torch takes any failure of `read_metadata` for a checkpoint of another form, and goes on; here it is raised from
    the next call, where torch passes it on as it is.
    """

    _failure: Exception | None = None

    def read_metadata(self) -> Metadata:
        try:
            return super().read_metadata()
        except Exception as error:  # noqa: BLE001  (raised by set_up_storage_reader)
            self._failure = error
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure


def _note_older(error: DamagedCheckpoint, url: str, settings: StorageSettings | None) -> None:
    """Says which step to load instead."""
    damaged = error.checkpoint
    older = [ref for ref in session_at(url, settings).lineage.checkpoints() if damaged is None or ref < damaged]
    error.add_note(f"the checkpoint before it is that of step {max(older).step}" if older else "there is no older one")
