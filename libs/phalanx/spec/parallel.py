"""Where and how wide a run is laid out: `[parallel]`, `[cluster]`; and what trades memory for time without changing the
numbers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from phalanx.spec.keys import Mark, Section, key
from phalanx.spec.network import Network

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
MULTI_STAGE_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
ZERO_BUBBLE_SCHEDULES = ("interleaved_zero_bubble", "zbv", "dualpipev")
V_SCHEDULES = ("zbv", "dualpipev")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# What `layout = "auto"` chooses.
CHOSEN = (*AXES, "cp_comm_type", "ep", "zero", "schedule", "stages_per_rank", "local_batch_size")


class Parallel(Section):
    """Sizes of the mesh axes and how work is spread over them. One axis may be -1: the ranks that the others leave."""

    layout: Literal["given", "auto"] = key(
        Mark.PLACEMENT,
        "Who lays the run out: the keys below, or at every start the planner, for the ranks that there are.",
        "given",
    )
    pp: int = key(Mark.PLACEMENT, "Pipeline-parallel size.", 1, unit="ranks", ge=-1)
    dp_replicate: int = key(
        Mark.PLACEMENT, "Data-parallel replicas, each with all weights of its stage.", 1, unit="ranks", ge=-1
    )
    dp_shard: int = key(
        Mark.PLACEMENT, "Data-parallel ranks that share the weights and the optimizer state.", -1, unit="ranks", ge=-1
    )
    cp: int = key(Mark.PLACEMENT, "Context-parallel size: ranks that share one window.", 1, unit="ranks", ge=-1)
    cp_comm_type: Literal["all_gather", "a2a"] = key(
        Mark.PLACEMENT,
        "How attention sees the whole window: keys and values of all its ranks gathered to each, or whole windows of "
        "some of the heads by all-to-all (Ulysses; cp must divide n_heads / tp); without effect when cp is 1.",
        "all_gather",
    )
    tp: int = key(Mark.PLACEMENT, "Tensor- and sequence-parallel size.", 1, unit="ranks", ge=-1)
    ep: int = key(
        Mark.PLACEMENT, "Expert-parallel size; folds over dp_shard x cp and adds no ranks.", 1, unit="ranks", gt=0
    )
    zero: Literal[1, 2, 3] = key(
        Mark.PLACEMENT,
        "What is sharded over dp_shard: 1 optimizer state, 2 also gradients, 3 also weights between uses.",
        3,
    )
    cpu_offload: bool = key(
        Mark.PLACEMENT,
        "Whether weights, gradients and optimizer state lie in the host's memory, where the optimizer runs too; a GPU "
        "then holds only the layers that it computes with, and pays with transfers.",
        False,
    )
    schedule: Schedule = key(Mark.PLACEMENT, "Pipeline schedule; without effect when pp is 1.", "1f1b")
    stages_per_rank: int = key(
        Mark.PLACEMENT,
        "Pipeline stages of one rank.",
        1,
        unit="stages",
        shown="2 for schedules that need it, else 1",
        gt=0,
    )
    stage_split: str = key(
        Mark.PLACEMENT,
        'Layers of each pipeline stage: "cost" balances what ranks compute, embedding and head counted; "even" the '
        'number of layers; or their numbers, first stage to last, separated by commas ("9,9,8,6").',
        "cost",
        pattern=r"^(cost|even|[1-9][0-9]*( *, *[1-9][0-9]*)*)$",
    )
    local_batch_size: int = key(Mark.PLACEMENT, "Windows of one micro-batch on one rank.", 1, unit="windows", gt=0)

    @property
    def stage_lengths(self) -> tuple[int, ...] | None:
        """Layers of each stage where the job states them."""
        return None if self.stage_split in ("cost", "even") else tuple(map(int, self.stage_split.split(",")))

    @model_validator(mode="before")
    @classmethod
    def _stages_default(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("schedule") in MULTI_STAGE_SCHEDULES:
            return {"stages_per_rank": 2, **value}
        return value


class Cluster(Section):
    """The machines."""

    device: Literal["cpu", "cuda"] = key(Mark.PLACEMENT, "What a rank computes on.", "cpu")
    nproc: int = key(Mark.PLACEMENT, "Ranks of one node (on GPUs: one each).", 1, unit="ranks", gt=0)
    nodes: int = key(Mark.PLACEMENT, "Nodes.", 1, unit="nodes", gt=0)
    gpu: str | None = key(Mark.PLACEMENT, "Kind of GPU, for `phalanx plan` (H100-80, A100-80, ...).", None)
    gpu_memory_gib: float | None = key(
        Mark.PLACEMENT, "Memory of one GPU, where `gpu` is not in the planner's table.", None, unit="GiB", gt=0
    )
    cache_folder: str | None = key(
        Mark.FREE,
        "Folder on each node's own disk where its ranks share what they fetched of remote data.",
        None,
        shown="phalanx-UID/pieces below the folder for temporary files",
        min_length=1,
    )
    cache_gib: float = key(
        Mark.FREE,
        "Bound of that folder; 0 for none, then each rank fetches for itself. Data at file:// URLs is never copied.",
        8.0,
        unit="GiB",
        ge=0,
    )
    network: Network = Field(default_factory=Network)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nproc * self.nodes


class ActivationCheckpoint(Section):
    """Recompute of activations: the same numbers for less memory and more time."""

    mode: Literal["none", "selective", "full"] = key(
        Mark.FREE,
        "What of a layer's inside is computed again in backward: nothing; all but the outputs of matrix products and "
        "of attention; all.",
        "none",
    )
    every: int = key(
        Mark.FREE,
        "Which layers are recomputed: those whose number in the whole model, counted from 0, is a multiple of this.",
        1,
        unit="layers",
        gt=0,
    )


class Compile(Section):
    """torch.compile of each layer."""

    enable: bool = key(Mark.FREE, "Whether layers are compiled.", False)
