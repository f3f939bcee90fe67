"""What the events of a run add up to: a pure fold, for the progress display, the summary and the tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.gang import Event


@dataclass(slots=True)
class Tally:
    """Counts over all attempts that the events came from. Times are monotonic seconds of this host.

    steps_redone: steps that a later attempt did again. incidents: the cause of each failed attempt, in order.
    recoveries_s: from each failure to the first step that the next attempt finished.
    """

    step: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    eval_loss: float | None = None
    tokens: int = 0
    attempts: list[int] = field(default_factory=list)
    checkpoints: int = 0
    steps_redone: int = 0
    skipped_updates: int = 0
    incidents: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    data_waits_s: list[float] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    _failed_at_s: float | None = None
    _tokens_per_step: int = 0

    def observe(self, event: Event) -> None:
        """Takes one event of `trainer.local.run_job`."""
        match event.kind:
            case "opened" if event.rank == 0:
                self._open(int(event.fields["attempt"]), int(event.fields["step"]))
            case "progress":
                self._progress(event)
            case "stopped" | "finished" if event.rank == 0:
                self._advance(int(event.fields["step"]))
            case "evaluation":
                self.eval_loss = event.fields["loss"]
            case "committed":
                self.checkpoints += 1
            case "non_finite" | "overflow" if event.rank == 0:
                self.skipped_updates += 1
            case "incident":
                who = "the gang" if event.fields["rank"] is None else f"rank {event.fields['rank']}"
                self.incidents.append(f"{event.fields['kind']} of {who}: {event.fields['message']}")
            case "exit" | "error" if self._failed_at_s is None and _is_failure(event):
                self._failed_at_s = event.time_monotonic_s
            case _:
                pass

    def _open(self, attempt: int, start_step: int) -> None:
        self.attempts.append(attempt)
        num_redone = max(0, self.step - start_step)
        self.steps_redone += num_redone
        self.tokens -= num_redone * self._tokens_per_step
        self.step = start_step

    def _progress(self, event: Event) -> None:
        fields = event.fields
        self._tokens_per_step = int(fields["tokens"])
        self._advance(int(fields["step"]))
        if fields["loss"] is not None:
            self.losses[self.step] = self.final_loss = float(fields["loss"])
            self.first_loss = self.final_loss if self.first_loss is None else self.first_loss
        self.step_times_s.append(float(fields["step_time_s"]))
        self.data_waits_s.append(float(fields["data_wait_s"]))
        if self._failed_at_s is not None:
            self.recoveries_s.append(event.time_monotonic_s - self._failed_at_s)
            self._failed_at_s = None

    def _advance(self, step: int) -> None:
        """Steps between two lines of progress count as well (`metrics.log_freq`)."""
        self.tokens += self._tokens_per_step * max(0, step - self.step)
        self.step = step

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the steps that were told by the time that they took, over all ranks; None before the first step."""
        total_s = sum(self.step_times_s)
        return self._tokens_per_step * len(self.step_times_s) / total_s if total_s else None


def _is_failure(event: Event) -> bool:
    return event.kind == "error" or event.fields.get("exit_code") != 0
