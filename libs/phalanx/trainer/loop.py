"""The training loop of one rank, top to bottom."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass
from enum import StrEnum

import torch
import torch.distributed as dist

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.core.step_parts import Part
from phalanx.lineage.rollback import NOT_FINITE_AGAIN
from phalanx.stream import DamagedShard
from phalanx.trainer.control import Orders, Plan
from phalanx.trainer.expert_figures import expert_load, heat_fields
from phalanx.trainer.feed import StepInput
from phalanx.trainer.recorder import StepResult
from phalanx.trainer.replicator import Replicator
from phalanx.trainer.saver import Notes
from phalanx.trainer.schedule import learning_rate_factor
from phalanx.trainer.session import Session, loader_state

LOG = logging.getLogger(__name__)


class Ending(StrEnum):
    """Why the loop ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


def train(session: Session) -> Ending:
    """Steps until the job's last step or an order to stop; the state at the end is committed before this returns."""
    with session.model.clock.counting_waits():
        ending = steps(session)
    dist.barrier()
    return ending


def steps(session: Session) -> Ending:
    """The loop of `train`."""
    job, model, saver = session.prepared.job, session.model, session.saver
    clock, replicas = model.clock, session.replicas
    session.profiling.open()
    clock.start()
    plan = session.opening.plan
    orders = waiting = Orders.NONE
    session.phases.enter("first_step", session.step + 1)
    while session.step < session.last_step and Orders.STOP not in orders:
        if session.step >= plan.horizon_step:
            plan = adopted(session, plan, session.control.renew(session.step))
        started = time.perf_counter()
        session.step += 1
        with clock.part(Part.DATA):
            inputs = take(session)
        model.seed_step(session.step)
        model.loss_scale = session.loss_scale.value
        with session.step_times.work(session.step):
            loss = model.forward_backward(inputs.batch, max(1, inputs.valid_tokens))
            with clock.part(Part.BACKWARD):
                model.finish_gradients()
                expert_counts = model.take_expert_counts()
            with clock.part(Part.OPTIMIZER):
                gradients = model.gradients()
                replicas.prepare(gradients)
                square_sum = model.gradient_square_sum(gradients, by_replica=replicas.clips_apart)
        word = agree(session, loss, square_sum)
        clock.agreed()
        agreed = time.perf_counter()
        lr_factor = learning_rate_factor(session.step, job.lr_scheduler)
        update(session, gradients, word, lr_factor, expert_counts)
        result = StepResult(
            session.step,
            word.loss,
            word.gradient_norm,
            inputs.valid_tokens,
            time.perf_counter() - started,
            clock.end_step(),
            replicas.take_bytes(session.step, session.last_step),
            None
            if expert_counts is None or not session.recorder.records_steps
            else expert_load(job, expert_counts, word.balance_loss),
            session.loss_scale.value if session.loss_scale.is_dynamic else None,
        )
        session.recorder.add(result, inputs.windows.rows)
        session.step_times.tell(result, time.perf_counter() - agreed)
        tell(session, result, lr_factor * job.optimizer.lr, expert_counts, word.z_loss)
        session.loss_scale.after(is_finite=word.is_finite)
        with clock.part(Part.EVALUATION):
            metrics = evaluate_when_due(session)
        waiting |= word.orders
        orders = waiting if replicas.is_one(session.step, session.last_step) else Orders.NONE
        waiting &= ~orders
        is_ordered = orders & (Orders.STOP | Orders.CHECKPOINT) or session.step == session.last_step
        is_due = saver.due(session.step) and not may_go_back(session)
        if is_ordered or (is_due and not saver.skips(session.step, word.is_any_busy)):
            with clock.part(Part.CHECKPOINT):
                session.phases.enter("commit", session.step)
                saver.finish()
                session.phases.enter("save", session.step)
                notes = Notes(not is_ordered and saver.is_speculative(session.step), metrics)
                saver.save(loader_state(session), plan.journal_digest, counters(session), notes)
        elif session.replicator is not None and not word.is_any_busy and not word.is_any_copying:
            with clock.part(Part.CHECKPOINT):
                copy_when_due(session, session.replicator, plan, metrics)
        saver.check()
        tell_saves(session)
        if word.profile or session.profiling.is_measuring:
            session.phases.enter("profile", session.step)
        session.profiling.turn(session.step, word.profile)
        session.phases.enter(session.profiling.phase, session.step + 1)
    session.phases.enter("commit", session.step)
    saver.finish()
    tell_saves(session)
    return Ending.FINISHED if session.step >= session.last_step else Ending.STOPPED


def update(
    session: Session,
    gradients: list[torch.Tensor | None],
    word: Word,
    lr_factor: float,
    expert_counts: torch.Tensor | None,
) -> None:
    """The step's update, and of the routers' biases by what the experts had to do, once what is saved or copied of the
    state before has been captured; it is left out where it is not finite. Then the replicas meet, if they do at this
    step.
    """
    clock = session.model.clock
    with clock.part(Part.CHECKPOINT):
        session.saver.wait_captured()
        if session.replicator is not None:
            session.replicator.wait_captured()
    if word.is_finite:
        session.not_finite_since = None
    elif is_overflow(session, word):
        if session.rank == 0:
            session.report("overflow", step=session.step, loss=word.loss, loss_scale=session.loss_scale.value)
    else:
        refuse_update(session, word)
    with clock.part(Part.OPTIMIZER):
        if word.is_finite:
            session.optimizer.update(gradients, session.replicas.norm_of(word.norms), lr_factor)
            if expert_counts is not None:
                session.model.move_biases(expert_counts)
        gradients.clear()  # so that none is kept alive
        session.model.zero_gradients()
        session.replicas.meet(session.step, session.last_step, applied=word.is_finite)


def counters(session: Session) -> dict[str, int | float]:
    """Scalars of the state after a step, beside its tensors."""
    return {**session.optimizer.counters(), **session.loss_scale.counters()}


def copy_when_due(session: Session, replicator: Replicator, plan: Plan, metrics: dict[str, float]) -> None:
    """A copy of the state in the memory of nodes, where one is due; no rank has a save or a copy under way."""
    if replicator.due(session.step):
        schedule = counters(session)
        session.saver.copy(replicator, loader_state(session), plan.journal_digest, schedule, metrics)


def adopted(session: Session, before: Plan, plan: Plan) -> Plan:
    """The feed follows `plan` from now on; a change of the mixture is told by rank 0."""
    session.feed.follow(plan)
    if session.rank == 0 and plan.mixture != before.mixture:
        for change in plan.mixture[len(before.mixture) :]:
            session.report("mixture", **session.reading.told_of(session.feed.view.mixture, change.position))
    return plan


def take(session: Session) -> StepInput:
    """The input of the session's step. A shard that is damaged is reported, and read once more where that is said to
    help; else its error ends the attempt.
    """
    try:
        return session.feed.take(session.step)
    except DamagedShard as damage:
        key = session.reading.key_of(damage.shard, damage.key)
        session.report("bad_shard", shard=key, why=f"{damage.told}: {damage.why}", step=session.step)
        if not is_whole_after_all(session, damage):
            raise
        return session.feed.take(session.step)


def is_whole_after_all(session: Session, damage: DamagedShard) -> bool:
    """What whoever decides about damage says of it; a report that fails must not be told in the damage's place."""
    try:
        key = session.reading.key_of(damage.shard, damage.key)
        return session.control.report_shard(key, f"{damage.told}: {damage.why}", session.step)
    except OutsideError as error:
        LOG.warning("nothing is decided about the damage, so the next attempt meets it again: %s", error)
        return False


@dataclass(frozen=True, slots=True)
class Word:
    """What all ranks agree on at a step boundary, by one all-reduce. norms: the gradient's, or that of each replica's
    own. profile: number of the request for a profile that begins with the next step; 0 for none.
    """

    loss: float
    norms: tuple[float, ...]
    orders: Orders
    is_any_busy: bool
    is_any_copying: bool = False
    z_loss: float = 0.0
    balance_loss: float = 0.0
    profile: int = 0

    @property
    def gradient_norm(self) -> float:
        """The root of the mean of their squares."""
        return (
            math.sqrt(sum(norm * norm for norm in self.norms) / len(self.norms))
            if len(self.norms) > 1
            else self.norms[0]
        )

    @property
    def is_finite(self) -> bool:
        """Whether the update may be applied."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def agree(session: Session, loss: torch.Tensor, square_sum: torch.Tensor) -> Word:
    """Sums the ranks' parts of loss and squared norm, and joins their orders; the same on every rank."""
    orders = session.control.orders()
    copies = session.replicator
    flags = [float(Orders.STOP in orders), float(Orders.CHECKPOINT in orders), float(session.saver.busy)]
    flags += [float(copies.busy), float(copies.failed)] if copies is not None else [0.0, 0.0]
    flags.append(float(session.profiling.wanted()))
    squares = session.replicas.squares_of(square_sum)
    losses = torch.stack((loss.detach(), session.model.z_loss, session.model.balance_loss))
    parts = (losses, torch.tensor(flags, device=loss.device), squares)
    word = torch.cat([part.double() for part in parts])
    dist.all_reduce(word)
    loss_sum, z_loss, balance_loss, stops, checkpoints, busy, copying, uncopied, profile, *square_sums = word.tolist()
    if copies is not None:
        copies.agreed(any_busy=copying > 0, any_failed=uncopied > 0)
    joined = (Orders.STOP if stops else Orders.NONE) | (Orders.CHECKPOINT if checkpoints else Orders.NONE)
    norms = tuple(math.sqrt(square) if square >= 0 else math.nan for square in square_sums)
    return Word(loss_sum, norms, joined, busy > 0, copying > 0, z_loss, balance_loss, int(profile))


def is_overflow(session: Session, step: Word | StepResult) -> bool:
    """Whether no more is wrong with a step than that its gradients overflowed under a scaled loss: a lower scale
    follows.
    """
    return session.loss_scale.may_fall and math.isfinite(step.loss) and not math.isfinite(step.gradient_norm)


def refuse_update(session: Session, word: Word) -> None:
    """All ranks saw the same non-finite step: by the job's policy they leave its update out, end, or go back."""
    session.report("non_finite", step=session.step, loss=repr(word.loss), gradient_norm=repr(word.gradient_norm))
    if session.prepared.job.training.non_finite == "stop":
        raise PhalanxError(
            f"step {session.step}",
            value=f"loss {word.loss}, gradient norm {word.gradient_norm}",
            expected="finite numbers, since training.non_finite is 'stop'",
            remedy='lower optimizer.lr, or set training.non_finite = "skip" in a new job',
        )
    session.not_finite_since = session.not_finite_since or session.step
    if session.prepared.job.recovery.on_nan == "roll_back":
        roll_back_when_again(session, session.not_finite_since)


def may_go_back(session: Session) -> bool:
    """Whether the last steps gave nothing finite and the job may go back behind them: a checkpoint would be none to go
    back to, and no progress.
    """
    return session.not_finite_since is not None and session.prepared.job.recovery.on_nan == "roll_back"


def roll_back_when_again(session: Session, first_step: int) -> None:
    """Ends the attempt, on all ranks at once, where the steps since `first_step` are so many that it is no passing
    fault, and the ranks are who decides about it. What was saved before is committed first.
    """
    if session.step - first_step + 1 < NOT_FINITE_AGAIN or not session.control.roll_back(first_step, session.step):
        return
    session.saver.finish()
    raise RolledBack(
        f"steps {first_step} to {session.step} gave no finite loss and gradient: the next attempt begins before them "
        'and leaves their windows out (recovery.on_nan = "roll_back")'
    )


class RolledBack(RuntimeError):
    """Ends an attempt that all ranks gave up together; the next one goes back."""


def tell(session: Session, result: StepResult, lr: float, expert_counts: torch.Tensor | None, z_loss: float) -> None:
    """One progress event from rank 0; finite numbers only, as JSON has no others. expert_counts: of the step. A step
    whose gradients overflowed has its own event: whoever watches would take it for one that is not finite.
    """
    job = session.prepared.job
    if is_overflow(session, result):
        return
    if session.rank == 0 and (result.step % job.metrics.log_freq == 0 or result.step == session.last_step):
        tokens = job.training.global_batch_size * job.training.seq_len
        session.report(
            "progress",
            step=result.step,
            loss=result.loss if math.isfinite(result.loss) else None,
            gradient_norm=result.gradient_norm if math.isfinite(result.gradient_norm) else None,
            lr=lr,
            tokens=tokens,
            step_time_s=result.step_time_s,
            data_wait_s=result.parts.data_wait_s,
            parts=asdict(result.parts),
            **({"replica_bytes_per_token": bytes_per_token(session, tokens)} if job.has_apart_replicas else {}),
            **({"loss_scale": result.loss_scale} if result.loss_scale is not None else {}),
            **({"z_loss": z_loss if math.isfinite(z_loss) else None} if job.loss.z_loss else {}),
            **({"epochs": session.epochs()} if job.data.is_mixture else {}),
            **({"expert_load": asdict(result.experts)} if result.experts is not None else {}),
        )
        if expert_counts is not None and session.heat_pace.is_due(is_last=result.step == session.last_step):
            session.report("expert_heat", step=result.step, **heat_fields(expert_counts))


def bytes_per_token(session: Session, tokens: int) -> float:
    """What all ranks have handed to collectives over `dp_replicate` in this attempt, by the tokens that it has trained
    on; tokens: of one step.
    """
    return session.replicas.total_bytes / (tokens * max(1, session.step - session.start.step))


def tell_saves(session: Session) -> None:
    """One event from rank 0 for each save that was committed or left out: what it cost this rank."""
    for cost in session.saver.take_costs():
        if session.rank == 0:
            figures = cost.figures
            session.report(
                "save",
                step=cost.step,
                stall_s=cost.stall_s,
                num_skipped=cost.num_skipped,
                capture_s=figures.capture_s if figures else None,
                upload_s=figures.upload_s if figures else None,
                num_bytes=figures.num_bytes if figures else None,
            )


def evaluate_when_due(session: Session) -> dict[str, float]:
    """Held-out loss and metrics every `validation.freq` steps and at the last one: told, with None for what is not
    finite, and returned by name where they are finite; nothing at other steps.
    """
    job = session.prepared.job
    if session.evaluator is None or (session.step % job.validation.freq and session.step != session.last_step):
        return {}
    session.phases.enter("evaluation", session.step)
    loss, others = session.evaluator.measure()
    told = {name: value if math.isfinite(value) else None for name, value in others.items()}
    if session.rank == 0:
        shown = {"metrics": told} if others else {}
        session.report("evaluation", step=session.step, loss=loss if math.isfinite(loss) else None, **shown)
    finite = {name: value for name, value in told.items() if value is not None}
    return {**({"validation_loss": loss} if math.isfinite(loss) else {}), **finite}
