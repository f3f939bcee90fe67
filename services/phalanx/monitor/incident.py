"""An incident: a verdict with what was asked for and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.rules import Action, Verdict


@dataclass(frozen=True, slots=True)
class Incident:
    """id: names it for good. job: "" where it concerns none. action: what the policy asked for. outcome: what was done,
    "" while that is not known. time_ns: by the monitor's wall clock, for people. is_reported: train has taken it, or it
    needs not.
    """

    id: str
    job: str
    attempt: int
    step: int
    last_step: int
    cause: record_pb.Cause
    action: Action
    outcome: str
    time_ns: int
    is_reported: bool

    @property
    def kind(self) -> str:
        """Of its cause, in lower case."""
        return kind_name(self.cause.kind)


def kind_name(kind: record_pb.CauseKind.ValueType) -> str:
    """CAUSE_KIND_GPU_FAULT as `gpu_fault`; a number that this version does not know as itself."""
    known = record_pb.CauseKind.DESCRIPTOR.values_by_number.get(kind)
    return known.name.removeprefix("CAUSE_KIND_").lower() if known is not None else str(kind)


def action_value(action: Action) -> train_pb.IncidentAction.ValueType:
    """As the contract names it."""
    return train_pb.IncidentAction.Value(f"INCIDENT_ACTION_{action.value.upper()}")


def action_name(action: train_pb.IncidentAction.ValueType) -> str:
    """As people read it."""
    known = train_pb.IncidentAction.DESCRIPTOR.values_by_number.get(action)
    return known.name.removeprefix("INCIDENT_ACTION_").lower().replace("_", " ") if known is not None else str(action)


def incident_of(job: str, verdict: Verdict, action: Action, time_ns: int) -> Incident:
    """The incident of a verdict, before anybody was told."""
    cause = record_pb.Cause(
        kind=record_pb.CauseKind.Value(f"CAUSE_KIND_{verdict.kind.value.upper()}"),
        message=verdict.message,
        node_id=verdict.node,
    )
    if verdict.rank is not None:
        cause.rank = verdict.rank
    return Incident(
        verdict.id(job),
        job,
        verdict.attempt,
        verdict.first_step,
        verdict.last_step,
        cause,
        action,
        "" if job else "no job runs there",
        time_ns,
        is_reported=not job,
    )
