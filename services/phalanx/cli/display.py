"""Shows a run to a person: a bar and a line a step on a terminal, plain lines elsewhere; incidents always stay on the
screen.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phalanx.gang import Event
from phalanx.trainer.tally import Tally


class RunDisplay:
    """A context manager that takes the events of a run; keeps the tally of them."""

    def __init__(self, console: Console, total_steps: int, title: str) -> None:
        self.tally = Tally()
        self._console, self._total_steps, self._title = console, total_steps, title
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total_steps, numbers="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def observe(self, event: Event) -> None:
        """Shows one event."""
        self.tally.observe(event)
        fields = event.fields
        match event.kind:
            case "opened" if event.rank == 0:
                self._say(f"attempt {fields['attempt']} opens after step {fields['step']}")
            case "progress":
                self._show_step(event)
            case "evaluation":
                more = "".join(f", {name} {_number(value)}" for name, value in fields.get("metrics", {}).items())
                self._say(f"step {fields['step']}: held-out loss {_number(fields['loss'])}{more}")
            case "committed":
                self._say(f"checkpoint of step {fields['step']} committed", "green")
            case "mixture":
                parts = ", ".join(f"{name} {part:.3g}" for name, part in fields["parts"].items())
                self._say("; ".join([f"from step {fields['step']} on: {parts}", *fields["foretold"]]))
            case "damage":
                self._say(f"{fields['checkpoint']} is damaged and will not be used again: {fields['why']}", "red")
            case "non_finite" if event.rank == 0:
                self._say(
                    f"step {fields['step']}: loss {fields['loss']}, norm {fields['gradient_norm']}: update left out",
                    "yellow",
                )
            case "overflow" if event.rank == 0:
                self._say(
                    f"step {fields['step']}: gradients overflowed at a loss scale of {fields['loss_scale']:g}: "
                    "update left out, a lower scale follows",
                    "yellow",
                )
            case "incident":
                where = f" at {fields['where']}" if fields["where"] else ""
                after = "the next attempt follows" if fields["retry"] else "no further attempt"
                rank = "" if fields["rank"] is None else f" of rank {fields['rank']}"
                self._say(f"incident: {fields['kind']}{rank}: {fields['message']}{where}; {after}", "red")
                if fields["kind"] == "hang" and fields["detail"]:
                    self._say(fields["detail"])
            case "stopping":
                self._say(
                    f"stopping: a checkpoint is committed first (at most {fields['grace_s']:g} s; again to kill)",
                    "yellow",
                )
            case "killing":
                self._say("killed: the work since the last checkpoint will be done again", "red")
            case _:
                pass

    def _show_step(self, event: Event) -> None:
        fields = event.fields
        rate = fields["tokens"] / fields["step_time_s"]
        numbers = f"loss {_number(fields['loss'])}  norm {_number(fields['gradient_norm'])}  {rate:,.0f} tokens/s"
        if "replica_bytes_per_token" in fields:
            numbers += f"  {fields['replica_bytes_per_token']:,.1f} bytes/token between replicas"
        if fields.get("expert_load"):
            numbers += f"  busiest expert {fields['expert_load']['worst']:.2f} x mean"
            if (balance := fields["expert_load"].get("balance_loss")) is not None:
                numbers += f"  balance loss {_number(balance)}"
        if fields.get("z_loss") is not None:
            numbers += f"  z-loss {_number(fields['z_loss'])}"
        if fields.get("epochs"):
            numbers += "  epochs " + ", ".join(f"{name} {passes:.2f}" for name, passes in fields["epochs"].items())
        self._progress.update(self._task, completed=fields["step"], numbers=numbers)
        if not self._console.is_terminal:
            self._say(
                f"step {fields['step']}/{self._total_steps}  {numbers}  "
                f"lr {fields['lr']:.3g}  {fields['step_time_s']:.2f} s"
            )

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(f"{self._title}: {text}", style=style, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
