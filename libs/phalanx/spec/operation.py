"""How a run is named, kept, watched and kept alive: all keys here are free, they change nothing that is learnt."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from pydantic import field_validator

from phalanx.spec.keys import URL_PATTERN, Mark, Section, key, wrong
from phalanx.spec.own import OwnName

Remedy: TypeAlias = Literal["notify", "skip", "roll_back"]

_NAME = r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$"


class JobSection(Section):
    """What the job is called and where everything about it is kept."""

    name: str = key(Mark.FREE, "Name of the job; running it again continues it.", pattern=_NAME)
    project: str = key(Mark.FREE, "Project that the job belongs to.", "default", pattern=_NAME)
    storage: str = key(Mark.FREE, "URL of the store for attempts, records and checkpoints.", pattern=URL_PATTERN)


class Checkpoint(Section):
    """When checkpoints are taken and how many stay."""

    interval: int = key(Mark.FREE, "Steps between checkpoints.", 500, unit="steps", gt=0)
    keep_latest_k: int = key(Mark.FREE, "Newest checkpoints that stay; 0 keeps all.", 0, unit="checkpoints", ge=0)
    keep_every_n: int = key(
        Mark.FREE,
        "Checkpoints at multiples of this many steps stay, beside the newest; 0 keeps none for that reason.",
        0,
        unit="steps",
        ge=0,
    )
    keep_best_m: int = key(
        Mark.FREE,
        "Best checkpoints by `keep_best_by` that stay, beside the newest; 0 keeps none for that reason.",
        0,
        unit="checkpoints",
        ge=0,
    )
    keep_best_by: Literal["loss", "validation_loss"] = key(
        Mark.FREE,
        "What tells which are best: the mean training loss of the last 100 steps up to a checkpoint, or the held-out "
        "loss that was evaluated at its step.",
        "loss",
    )
    keep_best_order: Literal["min", "max"] = key(Mark.FREE, "Whether the least or the greatest is best.", "min")
    speculative_interval: int = key(
        Mark.FREE,
        "Steps between speculative checkpoints, taken between the regular ones; 0 takes none.",
        0,
        unit="steps",
        ge=0,
    )
    speculative_keep_k: int = key(
        Mark.FREE,
        "Newest speculative checkpoints that stay, beside the last one that was found healthy.",
        1,
        unit="checkpoints",
        ge=1,
    )
    speculative_healthy_steps: int = key(
        Mark.FREE, "Healthy steps after a speculative checkpoint that promote it.", 100, unit="steps", gt=0
    )
    memory_interval: int = key(
        Mark.FREE,
        "Steps between copies of the state that nodes keep in memory for each other, taken between checkpoints where "
        "no save is under way; after a failure the run goes on from the newest one. For runs of agents; 0 takes none.",
        0,
        unit="steps",
        ge=0,
    )
    when_busy: Literal["wait", "skip"] = key(
        Mark.FREE,
        "What happens when the last save still runs: training waits for it, or this save is left out.",
        "wait",
    )
    partial: str = key(
        Mark.FREE,
        "Tensors that may be missing in the checkpoint that is restored, or in the job, their names separated by "
        "commas: what is missing in the checkpoint begins as in a new job. Any other that is missing is an error.",
        "",
    )

    @property
    def partial_names(self) -> tuple[str, ...]:
        """The names in `partial`, each spelt out."""
        return tuple(name.strip() for name in self.partial.split(",") if name.strip())


class Validation(Section):
    """Evaluation on the held-out split."""

    freq: int = key(Mark.FREE, "Steps between evaluations; 0 never evaluates.", 0, unit="steps", ge=0)
    windows: int = key(Mark.FREE, "Windows of one evaluation, always the same ones.", 64, unit="windows", gt=0)


MAX_METRICS = 16  # names of `metrics.fn`: each is a chart of the page and a figure of every record


class Metrics(Section):
    """Where the numbers go besides the records in storage."""

    log_freq: int = key(Mark.FREE, "Steps between lines of progress.", 1, unit="steps", gt=0)
    enable_tensorboard: bool = key(Mark.FREE, "Whether TensorBoard files are written.", False)
    enable_wandb: bool = key(Mark.FREE, "Whether Weights & Biases is written to.", False)
    folder: str = key(Mark.FREE, "Local folder for the files of both.", "metrics", min_length=1)
    fn: dict[str, OwnName] = key(
        Mark.FREE,
        "Functions of your own that are evaluated beside the held-out loss, by the names under which they are shown: "
        '`{ accuracy = "package.module:function" }`. Each is called with logits and targets and gives a sum over '
        f"tokens. At most {MAX_METRICS}.",
        {},
    )

    @field_validator("fn")
    @classmethod
    def _names_are_few_and_short(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > MAX_METRICS:
            raise wrong(
                f"at most {MAX_METRICS} names, not {len(value)}", "leave some out: each is a figure of every record"
            )
        for name in value:
            if name in ("loss", "validation_loss"):
                raise wrong(f"names that no figure of Phalanx has, not {name!r}", "rename it")
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
                raise wrong(f"names of lower-case letters, digits and `_`, at most 63, not {name!r}", "rename it")
        return value


class Deadlines(Section):
    """How long each stage of a rank may take before the gang is taken for hung."""

    init_s: float = key(Mark.FREE, "Start of the ranks until all have met.", 120.0, unit="seconds", gt=0)
    restore_s: float = key(Mark.FREE, "Reading a checkpoint.", 600.0, unit="seconds", gt=0)
    first_step_s: float = key(Mark.FREE, "First step, with compilation.", 300.0, unit="seconds", gt=0)
    step_s: float = key(Mark.FREE, "Every later step.", 120.0, unit="seconds", gt=0)
    save_s: float = key(Mark.FREE, "Writing a checkpoint.", 600.0, unit="seconds", gt=0)
    evaluation_s: float = key(Mark.FREE, "One evaluation.", 600.0, unit="seconds", gt=0)
    plan_s: float = key(
        Mark.FREE,
        "How long ranks wait for services that are away: at a horizon for the next plan, and for a commit.",
        3600.0,
        unit="seconds",
        gt=0,
    )
    stop_grace_s: float | None = key(
        Mark.FREE,
        "From the request to stop until ranks are killed: time for a step and its checkpoint.",
        None,
        unit="seconds",
        shown="step_s + save_s",
        gt=0,
    )

    @property
    def grace_s(self) -> float:
        """`stop_grace_s`, or its default."""
        return self.stop_grace_s if self.stop_grace_s is not None else self.step_s + self.save_s


class Recovery(Section):
    """When a failing run gives up, and what follows from what goes wrong in it: `notify` tells a person and goes on,
    `skip` takes the windows in question out, `roll_back` goes back to the last good checkpoint and takes them out.
    """

    max_attempts_without_progress: int = key(
        Mark.FREE, "Attempts in a row without a new checkpoint after which the job fails.", 3, unit="attempts", gt=0
    )
    on_nan: Remedy = key(
        Mark.FREE,
        "What follows when three steps in a row give no finite loss or gradient; a single one is left out by "
        "`training.non_finite`. Without the services the ranks do `roll_back` together, and nobody the others.",
        "skip",
    )
    on_spike: Remedy = key(Mark.FREE, "What follows when the loss jumps far above its course.", "notify")
    on_divergence: Remedy = key(Mark.FREE, "What follows when the loss climbs and does not come back.", "notify")
    on_hang: Literal["restart", "notify"] = key(
        Mark.FREE,
        "What follows when a rank hangs: its gang is ended and started again, or a person is told.",
        "restart",
    )
    on_bad_shard: Literal["stop", "skip"] = key(
        Mark.FREE,
        "What follows when a shard of the training data is damaged: the job stops, or goes on without its windows.",
        "stop",
    )
    bad_shard_budget: float = key(
        Mark.FREE,
        'Share of the training shards that `on_bad_shard = "skip"` may take out before the job stops; one shard '
        "always may, 0 allows none.",
        0.001,
        ge=0,
        le=1,
    )


class Storage(Section):
    """How one bucket is reached: NAME is the bucket of the URL, `default` serves every other. Credentials come from the
    AWS variables."""

    endpoint: str | None = key(Mark.FREE, "URL of an S3 server other than AWS.", None, pattern=r"^https?://")
    region: str | None = key(Mark.FREE, "Region of the bucket.", None)
    addressing: Literal["path", "virtual"] = key(
        Mark.FREE, "Whether the bucket stands in the path or in the host name.", "path"
    )
    ca_bundle: str | None = key(Mark.FREE, "File of certificates to trust besides the system's.", None)
    profile: str | None = key(Mark.FREE, "Profile of the AWS configuration files to take credentials from.", None)
