"""Memory of one rank in bytes: weights, gradients, optimizer state and activations, as Phalanx holds them on FSDP2.

Let P be the rank's parameters after pp, tp and ep, N = dp_shard x cp, b the bytes of a weight in computation (2 for
bfloat16).
- masters: fp32, sharded: 4 P / N. Optimizer: AdamW's two fp32 moments: 8 P / N; Muon's one of what lies inside the
  layers: 4 P / N of it. Replicas that tell each other less hold more (`replicas`). Whole matrices that Muon sums up,
  1 GiB at most, come when activations are gone.
- weights gathered for computation: b P at zero 1 and 2. At zero 3 without a pipeline: two layers (the running one and
  the prefetched one) and the ends of the model, which stay. With a pipeline torch keeps a stage's weights after its
  first backward: b P again.
- gradients: at zero 1 with several micro-batches, and always with a pipeline, whole, 4 P (2 P where they are summed
  in bfloat16), until they are reduced block by block, and a block's buffer; else 4 P / N of the micro-batches before,
  and one layer's, in computation type and as the buffer of the reduction, beside the head's. With a single micro-batch
  those of the layers come as the activations go.
- activations and gradients together are most at one of five moments: the loss; the head's backward; that of the last
  layer; that of the first one, when all other layers' activations are gone and their gradients there; the end, when
  those of both ends of the model are reduced.
- offloaded (`cpu_offload`): masters, optimizer and sharded gradients, 16 P / N, lie in the host's memory; on the device
  is beside the rest a layer's part of the masters, on its way to be gathered.
- paged (`optimizer.offload`): the moments, 8 P / N, lie on a local disk, twice for the sake of checkpoints that are
  read while updates go on; in memory are a few pages.
So zero 1 takes 6 + 12 / N bytes a parameter in bfloat16 (measured with torch 2.13: gradients not yet synchronised are
whole and fp32), not ZeRO's printed 4 + 12 / N (arXiv 1910.02054, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.planner.activations import Activations, activation_bytes
from phalanx.planner.parameters import RankParameters, rank_parameters
from phalanx.planner.replicas import held_bytes
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.stages import PipelinePosition, num_micro_batches, positions
from phalanx.planner.whole import holds_whole
from phalanx.spec.layout import Layout

MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
DISK_SLOTS = 2  # places in the file of a page of optimizer state
PAGE_BUFFERS = 7  # pages that an update has in memory
BUDGET_PARTS = PAGE_BUFFERS + 1  # what a checkpoint reads through takes no more than a page
MOST_PAGE_BYTES = 32 << 20  # larger ones are no faster, and let the first and the last ones of an update wait longer
# Device context, communication buffers and the allocator's rounding: a round figure, not a measurement.
RUNTIME_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Peak bytes of one rank, by what they are for. gradients_bytes: on the device. host_bytes: in the host's memory,
    masters and optimizer among them; 0 where nothing is offloaded. paged_bytes: of moments on a local disk, where
    optimizer_bytes are those of the pages in memory.
    """

    position: PipelinePosition
    parameters: int
    masters_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    runtime_bytes: int
    host_bytes: int = 0
    paged_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """What stays through a run: masters and optimizer state, wherever they lie."""
        return self.masters_bytes + (self.paged_bytes or self.optimizer_bytes)

    @property
    def disk_bytes(self) -> int:
        """Of the file of the rank's optimizer state."""
        return DISK_SLOTS * self.paged_bytes

    @property
    def total_bytes(self) -> int:
        """All of it that lies on the device, at once."""
        moving = self.weights_bytes + self.gradients_bytes + self.activations_bytes
        held = 0 if self.host_bytes else self.masters_bytes + self.optimizer_bytes
        return held + moving + self.runtime_bytes


def rank_memory(
    model: ModelShape, layout: Layout, run: RunShape, runtime_bytes: int = RUNTIME_BYTES
) -> tuple[RankMemory, ...]:
    """The memory of a rank at each pipeline position; all ranks of one position are alike up to rounding.

    runtime_bytes: what a device keeps for itself; 0 on a CPU.
    """
    return tuple(_at(model, layout, run, position, runtime_bytes) for position in positions(model, layout, run))


def _at(model: ModelShape, layout: Layout, run: RunShape, position: PipelinePosition, runtime_bytes: int) -> RankMemory:
    held = rank_parameters(
        model,
        layout,
        position.num_layers,
        is_first=position.is_first,
        is_last=position.is_last,
        num_dense=position.num_dense,
    )
    shard = _sharded(held, layout)
    own = shard - held.copied // (layout.dp_shard * layout.cp)
    activations, gradients = _moving(held, shard, layout, run, activation_bytes(model, layout, run, position))
    ends = held.ends // (layout.dp_shard * layout.cp)
    moments = _moments(held, own, layout, run) + held_bytes(run, layout, own, ends)
    optimizer = min(run.paging_bytes, DISK_SLOTS * moments) if run.paging_bytes else moments
    return RankMemory(
        position=position,
        parameters=held.total,
        masters_bytes=MASTER_BYTES * shard,
        weights_bytes=_gathered_weights(held, layout, run) + (_on_the_way(held, layout) if run.cpu_offload else 0),
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        runtime_bytes=runtime_bytes,
        host_bytes=(MASTER_BYTES + GRADIENT_BYTES) * shard + optimizer if run.cpu_offload else 0,
        paged_bytes=moments if run.paging_bytes else 0,
    )


def page_bytes(budget_bytes: int) -> int:
    """Of a page of optimizer state at most, where a rank has `budget_bytes` of memory for pages."""
    return paging_memory(budget_bytes) // BUDGET_PARTS


def paging_memory(budget_bytes: int) -> int:
    """What of `budget_bytes` is taken for pages, at most."""
    return min(budget_bytes, BUDGET_PARTS * MOST_PAGE_BYTES)


def _sharded(held: RankParameters, layout: Layout) -> int:
    """Parameters of one rank's shard, rounded up: experts are cut over what ep leaves of dp_shard x cp."""
    shards = layout.dp_shard * layout.cp
    expert_shards = max(shards // layout.ep, 1)
    return -(-held.dense // shards) + -(-held.experts // expert_shards)


def _on_the_way(held: RankParameters, layout: Layout) -> int:
    """A layer's shard of the masters, copied to the device for its gathering."""
    return MASTER_BYTES * -(-max(held.block + held.block_experts, held.ends) // (layout.dp_shard * layout.cp))


def _moments(held: RankParameters, own: int, layout: Layout, run: RunShape) -> int:
    """Of the `own` parameters of the rank's shard. Norms, which are few, are counted as the matrices that they stand
    between.
    """
    if run.optimizer == "adamw":
        return MOMENT_BYTES * own
    ends = -(-held.ends // (layout.dp_shard * layout.cp))
    return MOMENT_BYTES * ends + MOMENT_BYTES // 2 * (own - ends)


def _gathered_weights(held: RankParameters, layout: Layout, run: RunShape) -> int:
    if holds_whole(layout, run):
        return 0  # the masters themselves
    if run.zero < 3 or layout.pp > 1:
        return run.param_bytes * held.total
    return run.param_bytes * min(held.total, 2 * (held.block + held.block_experts) + held.ends)


def _moving(
    held: RankParameters, shard: int, layout: Layout, run: RunShape, activations: Activations
) -> tuple[int, int]:
    """Activations and gradients when both together are most. Gradients of the end, when activations are gone, count as
    far as they are more.
    """
    gradients = _gradients(held, shard, layout, run)
    moments = [
        (activations.in_layers, gradients.in_layers),
        (activations.in_first_layer, gradients.in_first_layer),
        (activations.in_loss, gradients.before),
        (activations.in_head, gradients.in_head),
    ]
    most = max(moments, key=sum)
    return most[0], max(sum(most), gradients.at_end) - most[0]


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Bytes by the moment: before a micro-batch's backward; in that of the head; in that of the last layer, and of the
    first one, with what waits for its reduction; when all are reduced.
    """

    before: int
    in_head: int
    in_layers: int
    in_first_layer: int
    at_end: int


def _gradients(held: RankParameters, shard: int, layout: Layout, run: RunShape) -> _Gradients:
    block = held.block + held.block_experts
    several = num_micro_batches(layout, run) > 1
    # A loss in chunks counts its own sum of the head's gradient.
    head = 0 if run.chunk_tokens else run.param_bytes * held.head
    if holds_whole(layout, run):
        whole = run.reduce_bytes * shard
        before, after_head = whole if several else 0, run.reduce_bytes * held.head
        of_first = whole - run.reduce_bytes * held.ends + after_head
        return _Gradients(before, before + head, before or after_head, before or of_first, whole)
    if layout.pp > 1 or (run.zero == 1 and several):
        whole = run.reduce_bytes * held.total
        in_layers = whole + run.reduce_bytes * block
        return _Gradients(whole, whole + head, in_layers, in_layers, whole + run.reduce_bytes * held.ends)
    both, shards = run.param_bytes + run.reduce_bytes, layout.dp_shard * layout.cp
    sharded = 0 if run.cpu_offload else GRADIENT_BYTES * shard
    before, of_ends = sharded if several else 0, min(sharded, GRADIENT_BYTES * held.ends // shards)
    # The head's gradient is there before the layers'; the embedding's comes, and both are reduced, at the end.
    moving = run.param_bytes * held.head + both * block
    in_first_layer = (before or sharded - of_ends) + moving
    return _Gradients(before, before + head, before + moving, in_first_layer, sharded + both * held.ends)
