"""The job file as one frozen value: all sections, the layout for a world size, and the digests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from phalanx.core.digest import digest_of
from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec.checks import findings_of, resolve_axes
from phalanx.spec.data import Data
from phalanx.spec.keys import Mark, Section, child_section, mark_of
from phalanx.spec.layout import Layout
from phalanx.spec.model import Model, ModelArgs
from phalanx.spec.operation import Checkpoint, Deadlines, JobSection, Metrics, Recovery, Storage, Validation
from phalanx.spec.own import Code, Loss
from phalanx.spec.parallel import ActivationCheckpoint, Cluster, Compile, Parallel
from phalanx.spec.replicas import GradientCompression, LocalUpdates
from phalanx.spec.training import LOSS_SCALE_KEYS, LrScheduler, Optimizer, Training

IDENTITY_FORMAT = 1


class Job(Section):
    """One job file, checked and resolved (presets merged, defaults filled in)."""

    job: JobSection
    model: Model
    code: Code
    data: Data
    training: Training
    loss: Loss
    optimizer: Optimizer
    lr_scheduler: LrScheduler
    local_updates: LocalUpdates
    gradient_compression: GradientCompression
    parallel: Parallel
    activation_checkpoint: ActivationCheckpoint
    compile: Compile
    checkpoint: Checkpoint
    validation: Validation
    metrics: Metrics
    deadlines: Deadlines
    recovery: Recovery
    cluster: Cluster
    storage: dict[str, Storage]

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        """Absent tables count as empty, so that what misses inside is named key by key; the schedule ends with the run
        by default."""
        if not isinstance(value, dict):
            return value
        filled = {**{section: {} for section in cls.model_fields}, **value}
        scheduler, training = filled["lr_scheduler"], filled["training"]
        steps = training.get("steps") if isinstance(training, dict) else None
        if isinstance(scheduler, dict) and type(steps) is int and steps > 0:
            filled["lr_scheduler"] = {"total_steps": steps, **scheduler}
        return filled

    def layout(self, world_size: int) -> Layout:
        """The mesh of `world_size` ranks. Raises Problems with all that does not fit that world, PhalanxError where it
        is still to be chosen.
        """
        problems = [finding.problem for finding in findings_of(self, world_size)]
        if problems:
            raise Problems("layout", problems)
        if self.parallel.layout == "auto":
            raise PhalanxError(
                "parallel.layout",
                value="auto",
                expected="a layout that was chosen for this number of ranks",
                remedy="choose it by phalanx.planner.automatic.with_layout",
            )
        layout = resolve_axes(self.parallel, world_size)
        assert layout is not None
        return layout

    @property
    def own_names(self) -> dict[str, str]:
        """What the job names of the user's own, as `package.module:name`, by the key that names it."""
        named = {
            "model.class": self.model.class_,
            "loss.fn": self.loss.fn,
            "optimizer.class": self.optimizer.class_,
            **{f"metrics.fn.{name}": path for name, path in self.metrics.fn.items()},
        }
        return {key: path for key, path in named.items() if path is not None}

    @property
    def has_apart_replicas(self) -> bool:
        """Whether the trainer itself decides what replicas tell each other, rather than gradients being summed."""
        return self.local_updates.steps > 0 or self.gradient_compression.method != "none"

    def storage_settings(self, url: str) -> Storage:
        """The `[storage.NAME]` that serves `url`: its bucket's, else `default`, else all defaults."""
        bucket = url.partition("://")[2].partition("/")[0]
        return self.storage.get(bucket) or self.storage.get("default") or Storage()

    def identity(self) -> dict[str, Any]:
        """What makes this training run this one: identity keys and the first value of journaled ones, by section.

        Digests of the data are left out (`identity_digest` takes those that were found), and so are keys of the
        learning-rate schedule that have no effect. A key added to a later version of Phalanx must be left out while it
        has the value that means what was before.
        """
        chosen = select(self, (Mark.IDENTITY, Mark.JOURNALED))
        del chosen["data"]["train_digest"]
        if self.loss.fn is None:
            del chosen["loss"]["fn"], chosen["loss"]["args"]
        if not self.loss.z_loss:
            del chosen["loss"]["z_loss"]
        if not chosen["loss"]:
            del chosen["loss"]
        if self.training.mixed_precision_param != "float16":
            for name in LOSS_SCALE_KEYS:
                del chosen["training"][name]
        if self.training.float8_recipe == "none":
            del chosen["training"]["float8_recipe"]
        if self.optimizer.name != "muon":
            del chosen["optimizer"]["momentum"], chosen["optimizer"]["ns_steps"]
        if self.optimizer.decayed == "matrices":
            del chosen["optimizer"]["decayed"]
        if self.optimizer.class_ is None:
            del chosen["optimizer"]["class"], chosen["optimizer"]["args"]
        if isinstance(self.model.args, ModelArgs):
            for name in self.model.args.usual:
                del chosen["model"]["args"][name]
            for name in self.model.args.moe.usual if self.model.args.moe else ():
                del chosen["model"]["args"]["moe"][name]
            for name in self.model.args.rope_scaling.usual if self.model.args.rope_scaling else ():
                del chosen["model"]["args"]["rope_scaling"][name]
        if not self.local_updates.steps:
            del chosen["local_updates"]
        if self.gradient_compression.method == "none":
            del chosen["gradient_compression"]
        elif self.gradient_compression.method != "powersgd":
            del chosen["gradient_compression"]["rank"], chosen["gradient_compression"]["compressed"]
        elif self.gradient_compression.compressed == "matrices":
            del chosen["gradient_compression"]["compressed"]
        for source in chosen["data"].get("sources", {}).values():
            del source["digest"]
        if self.lr_scheduler.decay_type == "none":
            del chosen["lr_scheduler"]["total_steps"], chosen["lr_scheduler"]["min_lr_factor"]
        if self.lr_scheduler.decay_type == "none" or self.lr_scheduler.decay_ratio is None:
            del chosen["lr_scheduler"]["decay_ratio"]
        return chosen

    def identity_digest(self, data_digests: Mapping[str, str]) -> str:
        """`sha256:` over the identity and the digests of the training data by source (`{"train": "sha256:..."}` for a
        single split).

        Raises PhalanxError where a digest of the job file is another than the one found.
        """
        for name, source in self.data.training.items():
            found = data_digests.get(name)
            if source.digest not in (None, found):
                raise PhalanxError(
                    f"data.sources.{name}.digest" if self.data.is_mixture else "data.train_digest",
                    value=source.digest,
                    expected=f"the digest of the split at {source.url}, {found}",
                    remedy="correct the URL, or the digest if the data was meant to change (that is another run)",
                )
        return digest_of({"format": IDENTITY_FORMAT, "keys": self.identity(), "data": dict(data_digests)})

    def placement(self, world_size: int) -> dict[str, Any]:
        """Where this start runs: placement keys by section with every axis resolved, and the world size."""
        layout = self.layout(world_size)
        chosen = select(self, (Mark.PLACEMENT,))
        del chosen["parallel"]["layout"]  # where ranks are, not who said so
        if self.code.digest is None:
            del chosen["code"]
        if layout.cp == 1:
            del chosen["parallel"]["cp_comm_type"]  # came later, and says nothing there
        if layout.pp == 1:
            del chosen["parallel"]["stage_split"]  # so did this
        if not self.parallel.cpu_offload:
            del chosen["parallel"]["cpu_offload"]  # came later
        axes = {axis: getattr(layout, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        return {**chosen, "parallel": {**chosen["parallel"], **axes}, "world_size": world_size}


def plain(value: Any) -> Any:
    """Sections and mappings as plain dicts with the keys that a user writes."""
    if isinstance(value, Section):
        fields = type(value).model_fields.items()
        return {field.alias or attribute: plain(getattr(value, attribute)) for attribute, field in fields}
    return {name: plain(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def select(section: Section, marks: tuple[Mark, ...]) -> dict[str, Any]:
    """The keys of `section` and below that carry one of `marks`, as plain nested dicts without empty tables."""
    chosen: dict[str, Any] = {}
    for attribute, field in type(section).model_fields.items():
        value, name = getattr(section, attribute), field.alias or attribute
        child = child_section(field)
        if child is None:
            if mark_of(field) in marks:
                chosen[name] = value
        elif isinstance(value, Section):
            below = select(value, marks)
            if below:
                chosen[name] = below
        elif child[1]:
            named = {each: select(table, marks) for each, table in value.items()}
            if any(named.values()):
                chosen[name] = named
        elif attribute == "args" and Mark.IDENTITY in marks:
            chosen[name] = plain(value)
    return chosen
