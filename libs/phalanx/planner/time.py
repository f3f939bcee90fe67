"""Seconds of a step: computation, traffic that is seen, pipeline bubble, optimizer, by closed formulas.

A pipeline of stages with t_i seconds a micro-batch takes m max(t) + (sum(t) - max(t)) / v: each micro-batch passes the
slowest stage, and the others are filled once, v times faster where a rank has v stages in turn (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2). Zero-bubble schedules fill part of it with backwards of weights (Qi et al. 2024,
arXiv 2401.10241, table 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.core.errors import PhalanxError
from phalanx.planner.calibration import CALIBRATION, Calibration
from phalanx.planner.collectives import all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from phalanx.planner.compute import PRECISIONS, Chip
from phalanx.planner.layer import LayerTime, Place, head_time, layer_time, seen
from phalanx.planner.memory import MOMENT_BYTES
from phalanx.planner.muon import update_s
from phalanx.planner.network import Cluster
from phalanx.planner.parameters import RankParameters, rank_parameters
from phalanx.planner.replicas import exchange_s
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.software import SPEEDS, Software, speed
from phalanx.planner.stages import PipelinePosition, num_micro_batches, positions
from phalanx.spec.layout import Layout

# Share of a plain pipeline's bubble that is left; 1F1B's is (p - 1) (F + B): ZB1P leaves (p - 1) (F + B - 2 W), a third
# where forward, inputs and weights take alike; ZB2P and ZBV none; DualPipe's (p / 2 - 1) (F&B + B - 3 W) about a sixth.
_BUBBLE_LEFT: Mapping[str, float] = MappingProxyType(
    {"zb1p": 1 / 3, "zb2p": 0.0, "zbv": 0.0, "interleaved_zero_bubble": 1 / 3, "dualpipev": 1 / 6}
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """All that a step's time depends on; a job file and a published measurement both map onto it.

    gpus: ranks in all, which the layout must make up. hbm_tbps: of GPUs whose memory differs from their kind's; 0: as
    the kind. clock: sustained rate relative to the kind's (a lower power limit).
    """

    model: ModelShape
    layout: Layout
    run: RunShape
    cluster: Cluster
    software: Software
    hbm_tbps: float = 0.0
    clock: float = 1.0

    @property
    def micro_batches(self) -> int:
        """Of one step and rank; Phalanx rounds up to what its schedules admit."""
        if self.software.stack == "phalanx":
            return num_micro_batches(self.layout, self.run)
        return math.ceil(self.run.global_batch_size / (self.layout.dp * self.run.local_batch_size))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of the slowest rank, by what they are for; all of them add up to total_s."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    pipeline_send_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float
    other_s: float
    micro_batches: int

    @property
    def total_s(self) -> float:
        """The step."""
        traffic = self.tensor_s + self.context_s + self.expert_s + self.pipeline_send_s + self.data_s
        return self.compute_s + self.recompute_s + traffic + self.bubble_s + self.optimizer_s + self.other_s


def check_configuration(config: Configuration) -> None:
    """Raises PhalanxError for counts that don't agree or cannot be cut."""
    model, layout, run = config.model, config.layout, config.run
    counts = (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.vocab_size)
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep)
    rest = (run.seq_len, run.global_batch_size, run.local_batch_size, run.stages_per_rank)
    if min(*counts, *sizes, *rest) < 1:
        raise PhalanxError(
            "model and layout", value=(*counts, *sizes, *rest), expected="counts of at least 1", remedy="correct them"
        )
    if layout.pp * run.stages_per_rank > model.n_layers + 2:
        raise PhalanxError(
            "parallel.pp",
            value=f"{layout.pp} x {run.stages_per_rank} stages",
            expected=f"at most one stage for each of {model.n_layers} layers",
            remedy="lower it",
        )
    if model.n_heads % layout.tp:
        raise PhalanxError(
            "parallel.tp",
            value=layout.tp,
            expected=f"a divisor of {model.n_heads} heads",
            remedy="lower it",
        )
    if run.precision not in PRECISIONS:
        raise PhalanxError(
            "precision", value=run.precision, expected=f"one of {', '.join(PRECISIONS)}", remedy="choose one of them"
        )


def step_time(
    config: Configuration,
    calibration: Calibration = CALIBRATION,
    speeds: Mapping[tuple[str, str, int], float] = SPEEDS,
) -> StepTime:
    """The time of one step. Raises PhalanxError for counts that don't agree and formats that the GPU lacks."""
    check_configuration(config)
    kind = config.cluster.gpu.name.split("-")[0]
    factor = speed(kind, config.software, speeds) * config.clock
    chip = Chip(
        config.cluster.gpu,
        config.software,
        PRECISIONS[config.run.precision],
        factor,
        config.hbm_tbps / config.clock if config.hbm_tbps else 0.0,
        calibration,
    )
    place = Place(config.model, config.layout, config.run, config.cluster, chip)
    return _assemble(config, place)


def _assemble(config: Configuration, place: Place) -> StepTime:
    layout, run, constants = config.layout, config.run, place.chip.calibration
    times = _stage_times(config, place)
    slowest = max((each for _, each in times), key=lambda each: each.total)
    micro_batches = config.micro_batches
    send = _send_s(place, slowest.total)
    per_batch = slowest.total + send
    stages = run.stages_per_rank if layout.pp > 1 else 1
    filled = sum(count * (each.total + send) for count, each in times) - per_batch
    bubble = filled / (1 if run.schedule in _BUBBLE_LEFT else stages) * _BUBBLE_LEFT.get(run.schedule, 1.0)
    if run.schedule == "gpipe":
        bubble = filled
    held = _largest_rank(config)
    data = _data_s(config, place, held, micro_batches, slowest)
    nodes = max(layout.world_size / config.cluster.gpus_per_node, 1.0)
    optimizer = _optimizer_s(config, place, held) + _muon_s(config, place)
    counted = micro_batches * per_batch + bubble + data + optimizer
    return StepTime(
        compute_s=micro_batches * (slowest.forward + slowest.backward),
        recompute_s=micro_batches * slowest.recompute,
        tensor_s=micro_batches * slowest.tensor,
        context_s=micro_batches * slowest.context,
        expert_s=micro_batches * slowest.expert,
        pipeline_send_s=micro_batches * send,
        bubble_s=bubble,
        data_s=data,
        optimizer_s=optimizer,
        other_s=constants.step_s + counted * constants.doubling * math.log2(nodes),
        micro_batches=micro_batches,
    )


def _stage_times(config: Configuration, place: Place) -> list[tuple[int, LayerTime]]:
    """One micro-batch through all stages of a pipeline rank, and how many ranks are alike."""
    model = config.model
    dense = layer_time(place, dense=True) if model.num_expert_layers < model.n_layers else LayerTime(0.0, 0.0)
    expert = layer_time(place, dense=False) if model.num_experts else None
    head = head_time(place)
    times = []
    for count, position in _alike(config):
        num_dense = position.num_layers if expert is None else position.num_dense
        parts = [(num_dense, dense), (int(position.is_last), head)]
        if expert is not None:
            parts.append((position.num_layers - num_dense, expert))
        times.append((count, _sum(parts)))
    return times


def _alike(config: Configuration) -> list[tuple[int, PipelinePosition]]:
    """One of each kind of pipeline rank, and how many there are."""
    found: dict[tuple[int, int, bool, bool], tuple[int, PipelinePosition]] = {}
    for position in positions(config.model, config.layout, config.run):
        key = (position.num_layers, position.num_dense, position.is_first, position.is_last)
        count, first = found.get(key, (0, position))
        found[key] = (count + 1, first)
    return list(found.values())


def _sum(parts: list[tuple[int, LayerTime]]) -> LayerTime:
    return LayerTime(
        forward=sum(count * each.forward for count, each in parts),
        backward=sum(count * each.backward for count, each in parts),
        recompute=sum(count * each.recompute for count, each in parts),
        tensor=sum(count * each.tensor for count, each in parts),
        context=sum(count * each.context for count, each in parts),
        expert=sum(count * each.expert for count, each in parts),
    )


def _send_s(place: Place, stage_s: float) -> float:
    """A micro-batch's activations to the next rank and its gradients back, for each stage of a rank."""
    layout, run, constants = place.layout, place.run, place.chip.calibration
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.dp
    group = place.cluster.group(layout.pp, stride, constants.nvlink_share, constants.network_share)
    # Each tp rank sends its part of the sequence, or of a whole copy (scatter and gather, arXiv 2104.04473, 4.1).
    num_bytes = 2 * place.tokens * place.model.dim / layout.tp
    seconds = 2 * run.stages_per_rank * send_s(num_bytes, group)
    return seen(seconds, stage_s, constants.exposed_pipeline) if place.chip.software.overlaps_pipeline else seconds


def _largest_rank(config: Configuration) -> RankParameters:
    held = [
        rank_parameters(
            config.model,
            config.layout,
            each.num_layers,
            is_first=each.is_first,
            is_last=each.is_last,
            num_dense=each.num_dense,
        )
        for _, each in _alike(config)
    ]
    return max(held, key=lambda each: each.total)


def _data_s(config: Configuration, place: Place, held: RankParameters, micro_batches: int, slowest: LayerTime) -> float:
    """Gradients and weights over the data-parallel ranks: dense parts over dp x cp, experts over what ep leaves. Where
    replicas tell each other less, over one replica's ranks, and what they exchange.
    """
    layout, run, constants = config.layout, config.run, place.chip.calibration
    ranks = (layout.dp_shard if run.has_apart_replicas else layout.dp) * layout.cp
    shares = (constants.nvlink_share, constants.network_share)
    exchange = exchange_s(config.model, run, layout, config.cluster, held.total, shares)
    if ranks == 1:
        return exchange
    groups = [(float(held.dense), config.cluster.group(ranks, layout.tp, *shares))]
    if held.experts:
        groups.append(
            (float(held.experts), config.cluster.group(max(ranks // layout.ep, 1), layout.tp * layout.ep, *shares))
        )
    weight_bytes = 1.03 if PRECISIONS[run.precision].bits < 16 and run.zero < 3 else 2.0
    overlaps = place.chip.software.overlaps_data
    total = exchange
    for count, group in groups:
        gather, gradients = weight_bytes * count, run.reduce_bytes * count
        if run.zero >= 3 and layout.pp == 1:
            per_batch = 2 * all_gather_s(gather, group) + reduce_scatter_s(gradients, group)
            compute = slowest.total * count / max(held.total, 1)
            total += micro_batches * (seen(per_batch, compute, constants.exposed_data) if overlaps else per_batch)
            continue
        once = all_reduce_s(gradients, group) if run.zero == 0 else 0.0
        if run.zero:
            once = reduce_scatter_s(gradients, group) + all_gather_s(gather, group)
        # Beside the last micro-batch's backward and the first one's forward.
        total += seen(once, slowest.total, constants.exposed_data) if overlaps else once
    return total


# A GPU's link to its host (PCIe 5.0 x16), and its share of the host's memory: round figures, in bytes a second. Two
# sockets of eight channels of DDR5-4800 have 614 GB/s for eight GPUs, of which streams reach about half.
_HOST_LINK, _HOST_MEMORY = 64e9, 38e9
# What a node's NVMe disks together read and write at once, each way: a round figure of four disks of PCIe 4.0.
_DISKS = 12e9


def _optimizer_s(config: Configuration, place: Place, held: RankParameters) -> float:
    """Adam reads gradient, master and two moments and writes the latter three and the weight: 30 bytes a parameter of
    the rank's shard; what lies in the host's memory crosses its link twice, or the host does it all. Pages on the
    node's disks are read and written beside the update, which is as slow as the slower."""
    run, layout = config.run, config.layout
    ranks = layout.dp * layout.cp if run.zero else 1
    shard = held.dense / ranks + held.experts / (max(ranks // layout.ep, 1) if run.zero else 1)
    paged_s = MOMENT_BYTES * shard * config.cluster.gpus_per_node / _DISKS if run.paging_bytes else 0.0
    if run.cpu_offload:
        return max(_host_s(config, shard), paged_s)
    over_link = 2 * MOMENT_BYTES if run.paging_bytes else run.offloaded * 2 * 12
    return max(30 * shard / place.chip.memory_rate + over_link * shard / _HOST_LINK, paged_s)


def _muon_s(config: Configuration, place: Place) -> float:
    """Of the stage of most layers; its ranks are neighbours but for pp, the outermost axis."""
    layout, constants = config.layout, place.chip.calibration
    ranks = layout.dp * layout.cp * layout.tp
    group = config.cluster.group(ranks, 1, constants.nvlink_share, constants.network_share)
    num_layers = max(position.num_layers for _, position in _alike(config))
    return update_s(config.model, config.run, num_layers, place.chip, group)


def _host_s(config: Configuration, shard: float) -> float:
    """What cpu_offload takes, counted as seen in full: fp32 masters to the device whenever they are gathered, fp32
    gradients back whenever they are reduced, and Adam on the host, 28 bytes a parameter without a weight of its own."""
    run, micro_batches = config.run, config.micro_batches
    alone = config.layout.pp == 1
    gathered = 2 * micro_batches if run.zero >= 3 and alone else 1
    reduced = micro_batches if run.zero >= 2 and alone else 1
    return 4 * (gathered + reduced) * shard / _HOST_LINK + 28 * shard / _HOST_MEMORY


def tokens_per_s_per_gpu(config: Configuration, step: StepTime) -> float:
    """Tokens of the global batch, a second and GPU."""
    return config.run.global_batch_size * config.run.seq_len / step.total_s / config.layout.world_size
