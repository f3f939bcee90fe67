"""One run as the monitor knows it: curve, ranks, incidents, events, attempts, and what is new about it.

Every change gets the next number (`version`); whoever watches names the last one that it has. Not safe for several
threads: the board that holds the runs is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.core.expert_load import ExpertLoad
from phalanx.monitor.attempts import AttemptFacts, Saved, owner_of, with_checkpoints
from phalanx.monitor.curve import Curve, Rows, StepFigures, overflowed
from phalanx.monitor.incident import Incident, kind_name
from phalanx.monitor.ranks import RankTable
from phalanx.monitor.rules import Action, Policy, Verdict
from phalanx.monitor.rules.loss import LossRule, LossState, LossStep, judged
from phalanx.spec.operation import MAX_METRICS

MAX_CHANGES = 8192
MAX_EVENTS = 10_000
MAX_INCIDENTS = 10_000
SPEED_STEPS = 10
REPLAYED_STEPS = 1024
ENDED = frozenset({train_pb.JOB_STATE_SUCCEEDED, train_pb.JOB_STATE_FAILED, train_pb.JOB_STATE_STOPPED})


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in one line. loss, tokens_per_second: None before the first step. heard_s: by the monotonic clock. experts,
    loss_scale: of the last step, where it has them.
    """

    job: str
    state: train_pb.JobState.ValueType = train_pb.JOB_STATE_UNSPECIFIED
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    step_time_s: float | None = None
    attempt: int = 0
    heard_s: float = 0.0
    experts: ExpertLoad | None = None
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What the held-out split gave. metrics: the job's own, by name. NaN where not finite. version: of the change."""

    loss: float
    metrics: Mapping[str, float]
    version: int


@dataclass(slots=True)
class Run:
    """load: reads the stored curve, when it is first needed. version: of the last change; first_version: of what was
    there when this process began.
    """

    summary: Summary
    load: Callable[[], Rows]
    version: int
    first_version: int
    loss_rule: LossRule = field(default_factory=LossRule)
    policy: Policy = field(default_factory=Policy)
    ranks: RankTable = field(default_factory=RankTable)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)  # by step
    heat: record_pb.ExpertHeat | None = None
    heat_version: int = 0
    incidents: dict[str, tuple[Incident, int]] = field(default_factory=dict)
    events: dict[int, tuple[train_pb.JobEvent, int]] = field(default_factory=dict)
    attempts: dict[int, AttemptFacts] = field(default_factory=dict)
    attempts_version: int = 0
    num_missed: int = 0
    num_stale: int = 0
    is_unsaved: bool = False
    used_s: float = 0.0
    _curve: Curve | None = None
    _loss: LossState = field(default_factory=LossState)
    _changes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    _is_cut: bool = True

    @property
    def job(self) -> str:
        """`projects/<p>/jobs/<uid>`."""
        return self.summary.job

    @property
    def curve(self) -> Curve:
        """The steps, read from the database where they are not in memory."""
        if self._curve is None:
            self._curve = Curve(self.load())
            self._loss = self._replayed()
        return self._curve

    @property
    def loaded(self) -> Curve | None:
        """The steps, where they are in memory."""
        return self._curve

    def restored(self) -> None:
        """It comes from the database: whether the newest attempt has done a step says whether it has cut the curve, and
        its events where its ranks are.
        """
        for event, _ in self.events.values():
            if event.attempt == self.summary.attempt:
                self._place(event)
        self._is_cut = self._attempt(self.summary.attempt).last_step > 0

    def unload(self) -> None:
        """Lets go of the steps; they must be saved."""
        self._curve = None

    # What comes in.

    def observe(self, record: record_pb.Record, now_s: float, heard_s: float) -> tuple[Verdict, ...]:
        """Takes a record that arrived at `now_s` by the attentive clock and `heard_s` by the monotonic one; what is
        wrong by it. What an older attempt says is counted, nothing else.
        """
        self.summary = replace(self.summary, heard_s=heard_s)
        if record.attempt < self.summary.attempt:
            self.num_stale += 1
            return ()
        self._begin(record.attempt)
        self._touch()
        found = self.ranks.observe(record.attempt, record, now_s)
        handle = _HANDLERS.get(record.WhichOneof("event") or "")
        return found + (handle(self, record) if handle else ())

    def observe_event(self, event: train_pb.JobEvent, heard_s: float) -> tuple[Incident, ...]:
        """Takes an event of the job; the incidents that it tells and that are not known."""
        if event.revision in self.events:
            return ()
        is_newest = event.revision > max(self.events, default=0)
        self.events[event.revision] = (event, self._touch())
        if len(self.events) > MAX_EVENTS:
            del self.events[min(self.events)]
        if is_newest:
            self.summary = replace(self.summary, state=event.state, heard_s=heard_s)
            if event.state in _OFF_NODES:
                self.ranks.end()
        if event.attempt >= self.summary.attempt and event.attempt:
            self._begin(event.attempt)
            self._place(event)
        if event.type == train_pb.JOB_EVENT_TYPE_COMMITTED:
            self._committed(event.attempt, event.step, event.time.ToNanoseconds())
        incident = told_incident(self.job, event, self.summary.step)
        return () if incident is None or self._knows(incident) else (incident,)

    def set_facts(self, facts: Iterable[AttemptFacts]) -> None:
        """What storage says of the attempts; it is the truth."""
        for each in facts:
            known = self._attempt(each.number)
            told = {name: getattr(each, name) for name in ("parent_attempt", "parent_step", "checkpoints", "layout")}
            self._set_attempt(replace(known, last_step=max(each.last_step, known.last_step), **told))

    def set_checkpoints(self, found: Iterable[Saved]) -> None:
        """What the checkpoint service says of them, attempt by attempt; those that it does not name are gone."""
        by_attempt: dict[int, list[Saved]] = {number: [] for number in self.attempts}
        for each in found:
            by_attempt.setdefault(each.attempt, []).append(each)
        for number, saved in by_attempt.items():
            self._set_attempt(with_checkpoints(self._attempt(number), saved))

    def set_spec(self, num_steps: int, policy: Policy) -> None:
        """What the job file says."""
        self.policy = policy
        if num_steps != self.summary.num_steps:
            self.summary = replace(self.summary, num_steps=num_steps)
            self._touch()

    def fill(self, rows: Rows) -> None:
        """Steps from storage, for those that are missing."""
        first = self.curve.fill(rows)
        if first is not None:
            self._loss = self._replayed()
            self._stepped(first)

    def put_incident(self, incident: Incident) -> None:
        """A new incident, or one that changed."""
        self.incidents[incident.id] = (incident, self._touch())
        if len(self.incidents) > MAX_INCIDENTS:
            del self.incidents[next(iter(self.incidents))]

    # What goes out.

    def has_version(self, version: int) -> bool:
        """Whether what changed after `version` is known: it is none of another process of the monitor."""
        is_kept = len(self._changes) < MAX_CHANGES or self._changes[0][0] <= version
        return self.first_version <= version <= self.version and is_kept

    def changed_from(self, version: int) -> int | None:
        """The first step that changed after `version`, which must be known; None where none did."""
        return min((step for at, step in self._changes if at > version), default=None)

    # Below: how each kind of record changes it.

    def progress(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        told = record.progress
        if not self._is_cut:
            self._cut(told.step - 1)
        loss = told.loss if told.HasField("loss") else math.nan
        norm = told.gradient_norm if told.HasField("gradient_norm") else math.nan
        speed = told.tokens / told.step_time_s if told.step_time_s > 0 else math.nan
        figures = StepFigures(
            told.step, loss, speed, norm, told.step_time_s, told.data_wait_s, told.learning_rate, record.attempt,
            **_later_figures(told),
        )  # fmt: skip
        self._put(figures)
        is_finite = told.HasField("loss") and told.HasField("gradient_norm")
        return self._judge(LossStep(record.attempt, told.step, loss, is_finite))

    def overflow(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        """A step of which no more is wrong than its loss scale, which falls: its loss is judged like any other."""
        told = record.overflow
        if not self._is_cut:
            self._cut(told.step - 1)
        unknown = (math.nan,) * 5
        self._put(StepFigures(told.step, told.loss, *unknown, record.attempt, loss_scale=told.loss_scale))
        return self._judge(LossStep(record.attempt, told.step, told.loss, is_finite=True))

    def expert_heat(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        self.heat, self.heat_version = record.expert_heat, self._touch()
        return ()

    def non_finite(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        if not self._is_cut:
            self._cut(record.non_finite.step - 1)
        return self._judge(LossStep(record.attempt, record.non_finite.step, math.nan, is_finite=False))

    def evaluation(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        told = record.evaluation
        metrics = {name: told.metrics[name] for name in sorted(told.metrics)[:MAX_METRICS]}
        self.evaluations[told.step] = Evaluated(
            told.loss if told.HasField("loss") else math.nan, metrics, self._touch()
        )
        return ()

    def opened(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        if not self._is_cut:
            step = record.opened.step
            parent = owner_of(self.attempts, record.attempt, step)
            self._set_attempt(replace(self._attempt(record.attempt), parent_attempt=parent, parent_step=step))
            self._cut(step)
        return ()

    def committed(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        told = record.committed
        self._committed(told.attempt or record.attempt, told.step, record.time.ToNanoseconds())
        return ()

    def save(self, record: record_pb.Record) -> tuple[Verdict, ...]:
        told, facts = record.save, self._attempt(record.attempt)
        stall_s = told.stall_s if told.HasField("stall_s") else facts.stall_s
        self._set_attempt(replace(facts, stall_s=stall_s, num_skipped=told.num_skipped))
        return ()

    def _put(self, figures: StepFigures) -> None:
        if self.curve.put(figures):
            self._stepped(figures.step)
            self._set_attempt(replace(self._attempt(figures.attempt), last_step=figures.step))

    def _judge(self, at: LossStep) -> tuple[Verdict, ...]:
        assert self.curve is not None  # loads it, and with it the state of the rules
        self._loss, verdicts = judged(self.loss_rule, self._loss, at)
        return verdicts

    def _begin(self, attempt: int) -> None:
        if attempt > self.summary.attempt:
            self._is_cut = self.summary.attempt == 0 and not len(self.curve)
            self.summary = replace(self.summary, attempt=attempt)
            self.ranks.begin()
            self._set_attempt(self._attempt(attempt))

    def _cut(self, last_step: int) -> None:
        """The newest attempt goes on behind `last_step`: what others did after it is done again."""
        self._is_cut = True
        if self.curve.cut(last_step):
            self._changes.append((self._touch(), last_step + 1))
        self.evaluations = {step: each for step, each in self.evaluations.items() if step <= last_step}
        self._loss = self._replayed()
        self._summarize()

    def _stepped(self, step: int) -> None:
        self._changes.append((self._touch(), step))
        self._summarize()

    def _summarize(self) -> None:
        rows = self.curve.rows[-SPEED_STEPS:]
        if not len(rows):
            self.summary = replace(
                self.summary, step=0, loss=None, tokens_per_second=None, step_time_s=None, experts=None, loss_scale=None
            )
            return
        timed = rows[(rows["step_time_s"] > 0) & (rows["tokens_per_second"] >= 0)]
        seconds = float(timed["step_time_s"].sum())
        tokens = float((timed["tokens_per_second"] * timed["step_time_s"]).sum())
        last = rows[-1]
        self.summary = replace(
            self.summary,
            step=int(last["step"]),
            loss=float(last["loss"]),
            tokens_per_second=tokens / seconds if seconds else None,
            step_time_s=float(timed["step_time_s"][-1]) if len(timed) else None,
            experts=_load_of(last),
            loss_scale=_known(last["loss_scale"]),
        )

    def _replayed(self) -> LossState:
        """What the rules would know, had they seen the last steps."""
        state = LossState()
        if self._curve is not None:
            rows = self._curve.rows[-REPLAYED_STEPS:]
            is_finite = np.isfinite(rows["gradient_norm"]) | overflowed(rows)
            for row, finite in zip(rows, is_finite, strict=True):
                at = LossStep(int(row["attempt"]), int(row["step"]), float(row["loss"]), bool(finite))
                state, _ = judged(self.loss_rule, state, at)
        return state

    def _place(self, event: train_pb.JobEvent) -> None:
        if event.placement:
            self.ranks.place({rank: each.node_id for each in event.placement for rank in each.ranks})

    def _committed(self, attempt: int, step: int, time_ns: int) -> None:
        facts = self._attempt(attempt)
        facts = replace(facts, checkpoints=tuple(sorted({*facts.checkpoints, step})))
        if step > facts.saved_step:
            facts = replace(facts, saved_step=step, saved_ns=time_ns, saved_bytes=0)
        self._set_attempt(facts)

    def _attempt(self, number: int) -> AttemptFacts:
        return self.attempts.get(number) or AttemptFacts(number)

    def _set_attempt(self, facts: AttemptFacts) -> None:
        if self.attempts.get(facts.number) != facts:
            self.attempts[facts.number] = facts
            self.attempts_version = self._touch()

    def _touch(self) -> int:
        self.version += 1
        self.is_unsaved = True
        return self.version

    def _knows(self, incident: Incident) -> bool:
        """Whether it is one of ours that train tells back, or the end of an attempt that one of ours asked for."""
        ours = [
            each
            for each, _ in self.incidents.values()
            if (each.attempt, each.cause.kind) == (incident.attempt, incident.cause.kind)
        ]
        return incident.id in self.incidents or any(
            each.step == incident.step or (incident.action is Action.RESTART and each.action in _ENDING)
            for each in ours
        )


def _later_figures(told: record_pb.Progress) -> dict[str, float]:
    """Those that not every job has."""
    found: dict[str, float] = {"loss_scale": told.loss_scale} if told.HasField("loss_scale") else {}
    if told.HasField("experts"):
        load = told.experts
        found |= {"expert_worst": load.worst, "expert_mean": load.mean, "expert_idle": load.idle}
        found |= {"balance_loss": load.balance_loss} if load.HasField("balance_loss") else {}
    return found


def _load_of(row: np.void) -> ExpertLoad | None:
    worst = _known(row["expert_worst"])
    if worst is None:
        return None
    return ExpertLoad(worst, float(row["expert_mean"]), float(row["expert_idle"]), _known(row["balance_loss"]))


def _known(value: np.float32) -> float | None:
    return None if np.isnan(value) else float(value)


_HANDLERS: Mapping[str, Callable[[Run, record_pb.Record], tuple[Verdict, ...]]] = {
    "progress": Run.progress,
    "non_finite": Run.non_finite,
    "evaluation": Run.evaluation,
    "expert_heat": Run.expert_heat,
    "overflow": Run.overflow,
    "opened": Run.opened,
    "committed": Run.committed,
    "save": Run.save,
}
_OFF_NODES = ENDED | {
    train_pb.JOB_STATE_QUEUED,
    train_pb.JOB_STATE_PREPARING,
    train_pb.JOB_STATE_RECOVERING,
    train_pb.JOB_STATE_SUSPENDED,
}
_ENDING = frozenset({Action.ROLL_BACK, Action.RESTART})
_TELLING = frozenset(
    {
        train_pb.JOB_EVENT_TYPE_INCIDENT,
        train_pb.JOB_EVENT_TYPE_RECOVERING,
        train_pb.JOB_EVENT_TYPE_FAILED,
    }
)


def told_incident(job: str, event: train_pb.JobEvent, at_step: int) -> Incident | None:
    """The incident that an event of the job tells: a verdict that train took, the death of a rank, or the end of an
    attempt. at_step: where the run is, for a death.
    """
    if event.type not in _TELLING or not event.HasField("cause"):
        return None
    own = f"{job}/incidents/a{event.attempt}-{kind_name(event.cause.kind)}-e{event.revision}"
    is_verdict = event.type == train_pb.JOB_EVENT_TYPE_INCIDENT
    is_death = is_verdict and event.cause.kind == record_pb.CAUSE_KIND_PROCESS_DEATH
    ends = is_death or event.type == train_pb.JOB_EVENT_TYPE_RECOVERING
    step = at_step if is_death else event.step
    return Incident(
        event.request_id if is_verdict and event.request_id.startswith(f"{job}/incidents/") else own,
        job,
        event.attempt,
        step,
        step,
        event.cause,
        Action.RESTART if ends else Action.NOTIFY,
        event.message,
        event.time.ToNanoseconds(),
        is_reported=True,
    )
