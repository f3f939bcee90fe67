"""From what ranks report to what the contract says: events to records, causes, and how a gang ended. Pure."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Mapping
from math import nan
from typing import Any

from phalanx.agent.inventory import Inventory
from phalanx.api.agent.v1 import agent_service_pb2 as agent_pb
from phalanx.api.agent.v1 import record_pb2 as pb
from phalanx.core.step_parts import Part
from phalanx.gang import Cause, Event, GangOutcome
from phalanx.gang.cause import first_cause

DROPPABLE = (
    "phase",
    "progress",
    "step_time",
    "save",
    "expert_heat",
    "overflow",
)  # fields of a record's event that a later one of its kind makes up for


def to_record(event: Event, *, attempt: int, node: str, started_s: float, wall_s: float) -> pb.Record | None:
    """The record of an event; None for what nobody beside the gang needs. started_s: when the gang started, by the
    clock of the event. wall_s: the wall clock of its moment.
    """
    make = _MAKERS.get(event.kind)
    if make is None or event.rank is None:
        return None
    record = pb.Record(rank=event.rank, attempt=attempt, since_start_s=max(0.0, event.time_monotonic_s - started_s))
    record.time.FromNanoseconds(int(wall_s * 1e9))
    make(record, event, node)
    return record


def is_droppable(record: pb.Record) -> bool:
    """Whether the record may be left out when train does not take records for long."""
    return record.WhichOneof("event") in DROPPABLE


def to_cause(cause: Cause, node: str) -> pb.Cause:
    """A cause as the contract tells it."""
    told = pb.Cause(
        kind=pb.CauseKind.Value(f"CAUSE_KIND_{cause.kind.upper()}"),
        message=cause.message,
        where=cause.where,
        detail=cause.detail,
        signal=cause.signal or 0,
        node_id=node,
    )
    if cause.rank is not None:
        told.rank = cause.rank
    if cause.exit_code is not None:
        told.exit_code = cause.exit_code
    return told


def to_state(outcome: GangOutcome) -> agent_pb.GangState.ValueType:
    """What became of the gang. One that a newer attempt ends did not fail."""
    if outcome.first_cause is not None and outcome.first_cause.kind == "superseded":
        return agent_pb.GANG_STATE_STOPPED
    return {
        "ok": agent_pb.GANG_STATE_FINISHED,
        "stopped": agent_pb.GANG_STATE_STOPPED,
        "failed": agent_pb.GANG_STATE_FAILED,
    }[outcome.state]


def to_gang_ended(outcome: GangOutcome, node: str, *, last_step: int, committed_step: int) -> agent_pb.GangEnded:
    """How a gang ended on this node."""
    cause = outcome.first_cause
    return agent_pb.GangEnded(
        state=to_state(outcome),
        cause=None if cause is None else to_cause(cause, node),
        weight=0 if cause is None else int(cause.weight),
        last_step=last_step,
        committed_step=committed_step,
    )


def to_inventory(inventory: Inventory) -> agent_pb.Inventory:
    """What the node has, as the contract tells it."""
    gpus = [agent_pb.Gpu(name=gpu.name, uuid=gpu.uuid, memory_bytes=gpu.memory_bytes) for gpu in inventory.gpus]
    return agent_pb.Inventory(
        host=inventory.host,
        address=inventory.address,
        num_slots=inventory.num_slots,
        num_cpus=inventory.num_cpus,
        memory_bytes=inventory.memory_bytes,
        gpus=gpus,
        nvlink_domain=inventory.nvlink_domain,
        rail=inventory.rail,
        leaf_switch=inventory.leaf_switch,
    )


def _entry(record: pb.Record, event: Event, node: str) -> None:
    record.phase.CopyFrom(pb.Phase(name="import", deadline_s=event.fields.get("deadline_s")))


def _phase(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    phase = pb.Phase(name=str(fields["name"]), step=int(fields.get("step") or 0), deadline_s=fields.get("deadline_s"))
    record.phase.CopyFrom(phase)


def _progress(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    record.progress.CopyFrom(
        pb.Progress(
            step=int(fields["step"]),
            loss=fields["loss"],
            gradient_norm=fields["gradient_norm"],
            learning_rate=float(fields["lr"]),
            tokens=int(fields["tokens"]),
            step_time_s=float(fields["step_time_s"]),
            data_wait_s=float(fields["data_wait_s"]),
            epochs=fields.get("epochs"),
            replica_bytes_per_token=fields.get("replica_bytes_per_token"),
            parts=_parts(fields),
            experts=_experts(fields),
            loss_scale=fields.get("loss_scale"),
        )
    )


def _step_time(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    record.step_time.CopyFrom(
        pb.StepTime(
            step=int(fields["step"]),
            step_time_s=float(fields["step_time_s"]),
            busy_s=float(fields.get("busy_s") or 0),
            parts=_parts(fields),
        )
    )


def _parts(fields: Mapping[str, Any]) -> pb.StepParts | None:
    """Where a step's time went, if the rank told it."""
    told = fields.get("parts")
    return None if told is None else pb.StepParts(**{part.value: float(told[part]) for part in Part})


def _experts(fields: Mapping[str, Any]) -> pb.ExpertLoad | None:
    """How its experts were loaded, where the model has any."""
    told = fields.get("expert_load")
    if told is None:
        return None
    load = pb.ExpertLoad(worst=float(told["worst"]), mean=float(told["mean"]), idle=float(told["idle"]))
    if told["balance_loss"] is not None:
        load.balance_loss = float(told["balance_loss"])
    return load


def _expert_heat(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    counts = {name: int(fields[name]) for name in ("step", "num_layers", "num_experts", "experts_per_cell")}
    record.expert_heat.CopyFrom(pb.ExpertHeat(**counts, load=b64decode(fields["load"])))


def _overflow(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    told = pb.Overflow(step=int(fields["step"]), loss=float(fields["loss"]), loss_scale=float(fields["loss_scale"]))
    record.overflow.CopyFrom(told)


def _committed(record: pb.Record, event: Event, node: str) -> None:
    attempt = int(event.fields.get("attempt", record.attempt))
    record.committed.CopyFrom(pb.Committed(attempt=attempt, step=int(event.fields["step"])))


def _save(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    stall_s = fields["stall_s"]
    record.save.CopyFrom(
        pb.Save(
            step=int(fields["step"]),
            stall_s=None if stall_s is None else float(stall_s),
            num_skipped=int(fields["num_skipped"]),
        )
    )


def _non_finite(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    record.non_finite.CopyFrom(
        pb.NonFinite(step=int(fields["step"]), loss=str(fields["loss"]), gradient_norm=str(fields["gradient_norm"]))
    )


def _evaluation(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    metrics = {name: nan if value is None else float(value) for name, value in fields.get("metrics", {}).items()}
    record.evaluation.CopyFrom(pb.Evaluation(step=int(fields["step"]), loss=fields["loss"], metrics=metrics))


def _opened(record: pb.Record, event: Event, node: str) -> None:
    record.opened.CopyFrom(pb.Opened(step=int(event.fields["step"])))


def _restored(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    counts = {name: int(fields[name]) for name in ("step", "memory_bytes", "holder_bytes", "storage_bytes")}
    record.restored.CopyFrom(pb.Restored(**counts, why=str(fields["why"])))


def _damage(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    what = str(fields.get("checkpoint") or fields.get("shard") or "")
    record.damaged.CopyFrom(pb.Damaged(what=what, why=str(fields["why"])))


def _error(record: pb.Record, event: Event, node: str) -> None:
    cause = first_cause([event], [])
    assert cause is not None
    record.error.CopyFrom(to_cause(cause, node))


def _hang(record: pb.Record, event: Event, node: str) -> None:
    """A hang that ended nothing."""
    record.error.CopyFrom(to_cause(Cause(**event.fields), node))


def _exit(record: pb.Record, event: Event, node: str) -> None:
    fields = event.fields
    record.ended.CopyFrom(
        pb.Ended(exit_code=fields["exit_code"], signal=fields["signal"] or 0, sent_by_us=bool(fields["sent_by_us"]))
    )


def _finished(record: pb.Record, event: Event, node: str) -> None:
    record.finished.CopyFrom(pb.Finished(step=int(event.fields["step"]), stopped=event.kind == "stopped"))


_MAKERS: Mapping[str, Callable[[Any, Event, str], None]] = {
    "entry": _entry,
    "phase": _phase,
    "progress": _progress,
    "step_time": _step_time,
    "committed": _committed,
    "save": _save,
    "non_finite": _non_finite,
    "evaluation": _evaluation,
    "expert_heat": _expert_heat,
    "overflow": _overflow,
    "opened": _opened,
    "restored": _restored,
    "damage": _damage,
    "bad_shard": _damage,
    "hang": _hang,
    "error": _error,
    "exit": _exit,
    "finished": _finished,
    "stopped": _finished,
}
