"""Between the contracts and the room's own values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from phalanx.api.agent.v1 import agent_service_pb2 as agent_pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.api.train.v1 import train_service_pb2 as pb
from phalanx.core.errors import PhalanxError
from phalanx.core.expert_load import ExpertLoad
from phalanx.core.step_parts import Part, StepParts
from phalanx.lineage import CheckpointRef
from phalanx.lineage.events import Assignment, Cause, EventType, JobEvent, JobState
from phalanx.lineage.registry import JobName, Origin
from phalanx.train.decide import Outcome, ShareEnd
from phalanx.train.launch.base import GangKey, GangState, Gpu, HeldGang, Inventory, Node
from phalanx.train.states import Job
from phalanx.train.values import EvaluationView, EventView, Intent, JobView, NodeView

# Causes.


def cause_message(cause: Cause | None) -> record_pb2.Cause | None:
    """A cause, or none."""
    if cause is None:
        return None
    kinds = record_pb2.CauseKind
    name = f"CAUSE_KIND_{cause.kind.upper()}"
    return record_pb2.Cause(
        kind=kinds.Value(name) if name in kinds.keys() else kinds.Value("CAUSE_KIND_ERROR"),  # noqa: SIM118
        rank=cause.rank,
        message=cause.message,
        where=cause.where,
        detail=cause.detail,
        signal=cause.signal,
        exit_code=cause.exit_code,
        node_id=cause.node_id,
    )


def cause_of(message: record_pb2.Cause) -> Cause:
    """The cause; a kind that this version does not know is an error."""
    kinds = record_pb2.CauseKind
    known = message.kind in kinds.values() and message.kind
    return Cause(
        kind=kinds.Name(message.kind).removeprefix("CAUSE_KIND_").lower() if known else "error",
        message=message.message,
        rank=message.rank if message.HasField("rank") else None,
        where=message.where,
        detail=message.detail,
        signal=message.signal,
        exit_code=message.exit_code if message.HasField("exit_code") else None,
        node_id=message.node_id,
    )


# Nodes.


def inventory_of(message: agent_pb.Inventory) -> Inventory:
    """What an agent says its node has."""
    return Inventory(
        host=message.host,
        address=message.address,
        num_slots=message.num_slots,
        num_cpus=message.num_cpus,
        memory_bytes=message.memory_bytes,
        gpus=tuple(Gpu(gpu.name, gpu.uuid, gpu.memory_bytes) for gpu in message.gpus),
        nvlink_domain=message.nvlink_domain,
        rail=message.rail,
        leaf_switch=message.leaf_switch,
        replica_address=message.replica_address,
        replica_bytes=message.replica_bytes,
    )


def inventory_message(inventory: Inventory) -> agent_pb.Inventory:
    """The inverse of `inventory_of`."""
    return agent_pb.Inventory(
        host=inventory.host,
        address=inventory.address,
        num_slots=inventory.num_slots,
        num_cpus=inventory.num_cpus,
        memory_bytes=inventory.memory_bytes,
        gpus=[agent_pb.Gpu(name=gpu.name, uuid=gpu.uuid, memory_bytes=gpu.memory_bytes) for gpu in inventory.gpus],
        nvlink_domain=inventory.nvlink_domain,
        rail=inventory.rail,
        leaf_switch=inventory.leaf_switch,
        replica_address=inventory.replica_address,
        replica_bytes=inventory.replica_bytes,
    )


def held_of(message: agent_pb.HeldGang) -> HeldGang:
    """A gang that an agent says it holds."""
    state = agent_pb.GangState.Name(message.state).removeprefix("GANG_STATE_").lower()
    known = GangState(state) if state in list(GangState) else GangState.RUNNING
    return HeldGang(GangKey(message.job, message.attempt), tuple(message.ranks), known)


def held_message(gang: HeldGang) -> agent_pb.HeldGang:
    """The inverse of `held_of`."""
    state = agent_pb.GangState.Value(f"GANG_STATE_{gang.state.upper()}")
    return agent_pb.HeldGang(job=gang.key.job, attempt=gang.key.attempt, ranks=gang.ranks, state=state)


def end_of(message: agent_pb.GangEnded) -> ShareEnd:
    """How a gang ended on a node."""
    outcomes = {agent_pb.GANG_STATE_FINISHED: Outcome.FINISHED, agent_pb.GANG_STATE_STOPPED: Outcome.STOPPED}
    return ShareEnd(
        outcomes.get(message.state, Outcome.FAILED),
        cause_of(message.cause) if message.HasField("cause") else None,
        message.weight,
        message.last_step,
        message.committed_step,
    )


def node_message(node: NodeView) -> pb.Node:
    """A node as clients see it."""
    return pb.Node(
        node_id=node.node.node_id,
        instance_id=node.node.instance_id,
        inventory=inventory_message(node.node.inventory),
        connected=node.node.is_connected,
        silent_s=node.node.silent_s,
        num_free_slots=node.num_free_slots,
        gangs=map(held_message, node.node.gangs),
        num_dropped_records=node.node.num_dropped_records,
    )


def node_of(message: pb.Node) -> NodeView:
    """The inverse of `node_message`."""
    node = Node(
        message.node_id,
        message.instance_id,
        inventory_of(message.inventory),
        message.connected,
        message.silent_s,
        tuple(map(held_of, message.gangs)),
        message.num_dropped_records,
    )
    return NodeView(node, message.num_free_slots)


# Jobs.


def state_message(state: JobState) -> pb.JobState.ValueType:
    """A state on the wire."""
    return pb.JobState.Value(f"JOB_STATE_{state.upper()}")


def state_of(message: int) -> JobState:
    """A state from the wire; raises PhalanxError for one that this version does not know."""
    if message not in pb.JobState.values() or not message:
        raise PhalanxError("state", value=message, expected="a state of jobs", remedy="update this client")
    return JobState(pb.JobState.Name(message).removeprefix("JOB_STATE_").lower())  # type: ignore[arg-type]


def _checkpoint_message(ref: CheckpointRef | None) -> pb.Checkpoint | None:
    return None if ref is None else pb.Checkpoint(attempt=ref.attempt, step=ref.step)


def _assignments_message(placement: Iterable[Assignment]) -> list[pb.Assignment]:
    return [pb.Assignment(node_id=each.node_id, ranks=each.ranks) for each in placement]


def _assignments(messages: Iterable[pb.Assignment]) -> tuple[Assignment, ...]:
    return tuple(Assignment(each.node_id, tuple(each.ranks)) for each in messages)


def job_message(view: JobView) -> pb.Job:
    """A job on the wire."""
    origin = view.origin
    return pb.Job(
        name=view.name,
        state=state_message(view.state),
        intent=pb.JobIntent.Value(f"JOB_INTENT_{view.intent.upper()}"),
        revision=view.revision,
        spec_json=json.dumps(view.spec),
        owner=view.owner,
        create_time=_time_message(view.created),
        attempt=view.attempt,
        step=view.step,
        num_steps=view.num_steps,
        checkpoint=_checkpoint_message(view.checkpoint),
        cause=cause_message(view.cause),
        message=view.message,
        placement=_assignments_message(view.placement),
        origin=None
        if origin is None
        else pb.Origin(job=str(origin.name), checkpoint=_checkpoint_message(origin.checkpoint)),
        loss=view.loss,
        num_attempts_without_progress=view.num_attempts_without_progress,
        epochs=view.epochs,
        replica_bytes_per_token=view.replica_bytes_per_token,
        step_parts=_parts_message(view.step_parts),
        expert_load=None if view.expert_load is None else record_pb2.ExpertLoad(**asdict(view.expert_load)),
        evaluation=_evaluation_message(view.evaluation),
    )


def job_of(message: pb.Job) -> JobView:
    """A job from the wire."""
    return JobView(
        name=message.name,
        state=state_of(message.state),
        intent=Intent(pb.JobIntent.Name(message.intent).removeprefix("JOB_INTENT_").lower()),
        revision=message.revision,
        spec=json.loads(message.spec_json),
        owner=message.owner,
        created=_time_of(message.create_time) if message.HasField("create_time") else "",
        attempt=message.attempt,
        step=message.step,
        num_steps=message.num_steps,
        checkpoint=CheckpointRef(message.checkpoint.attempt, message.checkpoint.step)
        if message.HasField("checkpoint")
        else None,
        cause=cause_of(message.cause) if message.HasField("cause") else None,
        message=message.message,
        placement=_assignments(message.placement),
        origin=_origin_of(message.origin) if message.HasField("origin") else None,
        loss=message.loss if message.HasField("loss") else None,
        num_attempts_without_progress=message.num_attempts_without_progress,
        epochs=dict(message.epochs),
        replica_bytes_per_token=message.replica_bytes_per_token
        if message.HasField("replica_bytes_per_token")
        else None,
        step_parts=parts_of(message.step_parts) if message.HasField("step_parts") else None,
        expert_load=load_of(message.expert_load) if message.HasField("expert_load") else None,
        evaluation=evaluation_of(message.evaluation) if message.HasField("evaluation") else None,
    )


def _sent_of(message: pb.Job) -> float | None:
    return message.replica_bytes_per_token if message.HasField("replica_bytes_per_token") else None


def parts_of(message: record_pb2.StepParts) -> StepParts:
    """Where a step's time went, from the wire."""
    return StepParts(**{part.value: getattr(message, part) for part in Part})


def _parts_message(parts: StepParts | None) -> record_pb2.StepParts | None:
    return None if parts is None else record_pb2.StepParts(**{part.value: getattr(parts, part) for part in Part})


def load_of(message: record_pb2.ExpertLoad) -> ExpertLoad:
    """How evenly experts were loaded, from the wire."""
    balance_loss = message.balance_loss if message.HasField("balance_loss") else None
    return ExpertLoad(message.worst, message.mean, message.idle, balance_loss)


def evaluation_of(message: record_pb2.Evaluation) -> EvaluationView:
    """An evaluation, from the wire, where a number stands also for what is not finite."""
    metrics = {name: value if math.isfinite(value) else None for name, value in message.metrics.items()}
    return EvaluationView(message.step, message.loss if message.HasField("loss") else None, metrics)


def _evaluation_message(view: EvaluationView | None) -> record_pb2.Evaluation | None:
    if view is None:
        return None
    metrics = {name: math.nan if value is None else value for name, value in view.metrics.items()}
    return record_pb2.Evaluation(step=view.step, loss=view.loss, metrics=metrics)


def _origin_of(message: pb.Origin) -> Origin:
    name = JobName.parse(message.job)
    return Origin(name.project, name.uid, message.checkpoint.attempt, message.checkpoint.step)


def job_view(
    job: Job,
    *,
    step: int | None = None,
    loss: float | None = None,
    epochs: Mapping[str, float] | None = None,
    replica_bytes_per_token: float | None = None,
    step_parts: StepParts | None = None,
    expert_load: ExpertLoad | None = None,
    evaluation: EvaluationView | None = None,
    waits: str = "",
) -> JobView:
    """A job as clients see it. step, loss, epochs, replica_bytes_per_token, step_parts, expert_load, evaluation: as the
    ranks of its newest attempt last told; None: as the events say.
    """
    registered = job.registered
    return JobView(
        name=str(job.name),
        state=job.state,
        intent=job.intent,
        revision=job.revision,
        spec=job.spec,
        owner=registered.owner,
        created=registered.created,
        attempt=job.attempt,
        step=job.step if step is None else step,
        num_steps=job.num_steps,
        checkpoint=job.checkpoint,
        cause=job.cause,
        message=waits or job.message,
        placement=job.placement,
        origin=registered.origin,
        loss=loss,
        num_attempts_without_progress=job.num_without_progress,
        epochs=dict(epochs or {}),
        replica_bytes_per_token=replica_bytes_per_token,
        step_parts=step_parts,
        expert_load=expert_load,
        evaluation=evaluation,
    )


# Events.


def event_message(event: JobEvent) -> pb.JobEvent:
    """An event on the wire; its data stays here."""
    return pb.JobEvent(
        revision=event.number,
        type=pb.JobEventType.Value(f"JOB_EVENT_TYPE_{event.type.upper()}"),
        state=state_message(event.state),
        time=_time_message(event.time),
        attempt=event.attempt,
        step=event.step,
        actor=event.actor,
        request_id=event.request_id,
        cause=cause_message(event.cause),
        message=event.message,
        placement=_assignments_message(event.placement),
    )


def event_of(message: pb.JobEvent) -> EventView:
    """An event from the wire."""
    return EventView(
        revision=message.revision,
        type=EventType(pb.JobEventType.Name(message.type).removeprefix("JOB_EVENT_TYPE_").lower()),
        state=state_of(message.state),
        time=_time_of(message.time),
        attempt=message.attempt,
        step=message.step,
        actor=message.actor,
        request_id=message.request_id,
        cause=cause_of(message.cause) if message.HasField("cause") else None,
        message=message.message,
        placement=_assignments(message.placement),
    )


def _time_message(text: str) -> Timestamp | None:
    if not text:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(datetime.fromisoformat(text))
    return stamp


def _time_of(message: Timestamp) -> str:
    return message.ToJsonString()
