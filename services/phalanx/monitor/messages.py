"""The room's values as messages of the contract."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import numpy as np

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.monitor.v1 import monitor_service_pb2 as pb
from phalanx.monitor.attempts import AttemptFacts, live, newest_checkpoint
from phalanx.monitor.curve import LATER, Rows
from phalanx.monitor.gpus import SourceState
from phalanx.monitor.incident import Incident, action_value
from phalanx.monitor.ranks import RankView
from phalanx.monitor.rules.gpu import GpuReading
from phalanx.monitor.run import Run

_GPU_FIGURES = (
    "utilization",
    "memory_used_bytes",
    "memory_total_bytes",
    "temperature_c",
    "power_w",
    "sm_clock_mhz",
    "xid",
    "ecc_uncorrectable",
)


def summary_message(run: Run) -> pb.RunSummary:
    """A run in one line."""
    summary = run.summary
    return pb.RunSummary(
        job=summary.job,
        state=summary.state,
        step=summary.step,
        num_steps=summary.num_steps,
        loss=summary.loss,
        tokens_per_second=summary.tokens_per_second,
        attempt=summary.attempt,
        num_incidents=len(run.incidents),
        silent_s=max(0.0, time.monotonic() - summary.heard_s),
        saves=saves_message(run.attempts, time.time_ns()),
        expert_load=None if summary.experts is None else record_pb.ExpertLoad(**asdict(summary.experts)),
        loss_scale=summary.loss_scale,
    )


def saves_message(attempts: Mapping[int, AttemptFacts], now_ns: int) -> pb.SaveSummary | None:
    """What is saved of a run, at `now_ns` since the epoch; None before its first save was due."""
    newest = newest_checkpoint(attempts)
    stalls = [facts.stall_s for _, facts in sorted(attempts.items()) if facts.stall_s is not None]
    num_skipped = sum(facts.num_skipped for facts in attempts.values())
    if newest is None and not stalls and not num_skipped:
        return None
    message = pb.SaveSummary(stall_s=stalls[-1] if stalls else None, num_skipped=num_skipped)
    if newest is not None:
        message.attempt, message.step = newest
        facts = attempts[message.attempt]
        if facts.saved_step == message.step and facts.saved_ns:
            message.age_s = max(0.0, (now_ns - facts.saved_ns) / 1e9)
        if facts.saved_step == message.step and facts.saved_bytes:
            message.num_bytes = facts.saved_bytes
    return message


def curve_message(rows: Rows) -> pb.Curve:
    """The rows as columns; those that few runs have only where they say something."""
    names = [name for name in rows.dtype.names or () if name not in LATER or not np.isnan(rows[name]).all()]
    return pb.Curve(**{name: rows[name].tolist() for name in names})


def evaluation_messages(run: Run, after_version: int = -1, after_step: int = -1) -> list[pb.EvaluationPoint]:
    """The evaluations that came after a version, behind a step."""
    return [
        pb.EvaluationPoint(step=step, loss=found.loss, metrics=found.metrics)
        for step, found in sorted(run.evaluations.items())
        if found.version > after_version and step > after_step
    ]


def rank_messages(views: Iterable[RankView]) -> list[pb.RankStatus]:
    """All ranks."""
    return [
        pb.RankStatus(
            rank=view.rank,
            node_id=view.node,
            phase=view.section,
            step=view.step,
            in_phase_s=view.in_section_s,
            busy_s=view.busy_s,
            alive=view.is_alive,
            note=view.note,
            parts=view.parts,
        )
        for view in views
    ]


def incident_message(incident: Incident) -> pb.Incident:
    """One incident."""
    message = pb.Incident(
        id=incident.id,
        job=incident.job,
        attempt=incident.attempt,
        step=incident.step,
        cause=incident.cause,
        action=action_value(incident.action),
        outcome=incident.outcome,
    )
    message.time.FromNanoseconds(incident.time_ns)
    return message


def attempt_messages(run: Run) -> list[pb.AttemptSummary]:
    """All attempts by number."""
    on_chain = live(run.attempts)
    return [
        pb.AttemptSummary(
            attempt=number,
            parent_attempt=facts.parent_attempt,
            parent_step=facts.parent_step,
            last_step=facts.last_step,
            checkpoints=facts.checkpoints,
            layout=facts.layout,
            live=number in on_chain,
            damaged=facts.damaged,
            pinned=facts.pinned,
        )
        for number, facts in sorted(run.attempts.items())
    ]


def gpu_message(reading: GpuReading, age_s: float) -> pb.Gpu:
    """One GPU, or one slice of it."""
    name = f"{reading.name} MIG {reading.gpu_instance}" if reading.gpu_instance else reading.name
    figures = {figure: getattr(reading, figure) for figure in _GPU_FIGURES}
    return pb.Gpu(node=reading.node, index=reading.index, name=name, uuid=reading.uuid, age_s=age_s, **figures)


def source_words(sources: dict[str, SourceState]) -> list[str]:
    """Each source with its state."""
    return [f"{name}: {state.words}" for name, state in sources.items()] or ["none"]
