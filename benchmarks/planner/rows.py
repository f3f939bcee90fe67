"""From a row of published measurements to a configuration of the planner, with what had to be assumed.

A row is an object with `model`, `cluster`, `parallel` and `software`, each with the fields that its source printed;
`measured` and `derived` are never read here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from phalanx.planner.gpus import find_gpu
from phalanx.planner.network import Cluster, cluster, usual_network_gbps
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.planner.software import Software, software, stacks
from phalanx.planner.stack_memory import largest_memory
from phalanx.planner.time import Configuration
from phalanx.spec import Layout

from .fields import Row, checked
from .models import model_shape

_PRECISIONS = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("rowwise", "fp8-rowwise"),
    ("tensorwise", "fp8-current"),
    ("fp8-cs", "fp8-current"),
    ("fp8", "fp8"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("fp32", "fp32"),
)
_SCHEDULES = {"zb-1p": "zb1p", "zb-h1": "zb1p", "zb-2p": "zb2p", "zb-h2": "zb2p", "zb-v": "zbv", "gpipe": "gpipe"}
_ROW_REMEDY = "name one of them, or leave gpu out"


@dataclass
class Read:
    """A row as the planner takes it. assumptions: sentences, one for each thing that the row left open. spills: what
    the GPU does not hold of the activations is taken to be computed again or to lie in the host's memory."""

    config: Configuration
    memory_gib: float | None
    assumptions: list[str] = field(default_factory=list)
    spills: bool = False


def read_row(row: Row) -> Read:
    """Raises PhalanxError for a GPU that is not known and for figures that can't be; see `agreement` for counts."""
    said: list[str] = []
    row = checked(row, said)
    used = _software(row, said)
    where, clock, hbm, memory_gib = _cluster(row, said)
    model = model_shape(row.get("model") or {}, said)
    parallel = row["parallel"] = _known_words(row.get("parallel") or {}, said)
    layout = _layout(parallel, row.get("cluster") or {}, said)
    run = _run(row, model.n_layers, layout, used, said)
    if parallel.get("async_tp") or "tp-comm" in str(parallel.get("overlap", "")):
        used = replace(used, overlaps_tensor=True)
    if parallel.get("torch_compile"):
        used = replace(used, fused=True)
    steps_given = parallel.get("global_batch") and (parallel.get("grad_accum") or parallel.get("microbatches"))
    if parallel.get("micro_batch") is None and layout.pp == 1 and not steps_given:
        capacity = memory_gib * 2**30 if memory_gib else where.gpu.memory_bytes
        run = _with_micro_batch(model, layout, run, used, capacity, said)
    if not parallel.get("recompute"):
        capacity = memory_gib * 2**30 if memory_gib else where.gpu.memory_bytes
        run = _with_recompute(model, layout, run, used, capacity, where.gpu.nvlink_domain > 8, said)
    config = Configuration(model, layout, run, where, used, hbm, clock)
    return Read(config, memory_gib, said, spills=not parallel.get("recompute") and run.recompute_share > 0)


def _known_words(parallel: Row, said: list[str]) -> Row:
    """The fields without the words for recompute and ZeRO that mean nothing here; these go to `said`."""
    kept = dict(parallel)
    for name, known in (("recompute", r"full|none|selective|minimal"), ("zero", _ZERO_WORDS)):
        written = kept.get(name)
        if written is not None and not re.match(known, str(written).strip().lower()):
            said.append(f"parallel.{name} {str(written)[:40]!r} is not known: taken as not given")
            del kept[name]
    return kept


# A stage as a number of its own, or the names of fully sharded data parallelism.
_ZERO_WORDS = r".*fsdp|.*no reshard|(.*[^\d.])?[0-3](?![\d.])"


def _with_micro_batch(
    model: ModelShape, layout: Layout, run: RunShape, used: Software, capacity: float, said: list[str]
) -> RunShape:
    """The largest micro-batch of 1, 2, 4, 8 that fits and divides the batch, where it is not given."""
    for size in (8, 4, 2):
        larger = replace(run, local_batch_size=size)
        divides = run.global_batch_size % (size * layout.dp) == 0
        if divides and largest_memory(model, layout, larger, used).total_bytes <= capacity:
            said.append(f"micro-batch not given: {size}, the largest that fits")
            return larger
    said.append("micro-batch not given: 1")
    return run


def _with_recompute(
    model: ModelShape,
    layout: Layout,
    run: RunShape,
    used: Software,
    capacity: float,
    offloads: bool,
    said: list[str],
) -> RunShape:
    """What is not given: none where the step fits without; cheap operations where these are enough, or where the host
    is so near the GPU (offloads) that activations lie there; else full."""
    needed = largest_memory(model, layout, run, used).total_bytes
    sizes = f"{needed / 2**30:.0f} of {capacity / 2**30:.0f} GiB"
    if needed <= capacity:
        said.append(f"recompute not given: none, as {sizes} suffice")
        return run
    if offloads or needed <= 1.3 * capacity:
        said.append(f"recompute not given: cheap operations or offload, as it takes {sizes}")
        return replace(run, recompute_share=0.1)
    said.append(f"recompute not given: full, as it takes {sizes}")
    return replace(run, recompute=True)


def _software(row: Row, said: list[str]) -> Software:
    given = row.get("software") or {}
    if not given.get("stack"):
        said.append("software not given: what was usual in its year")
    elif given["stack"].strip().lower() not in stacks():
        said.append(f"stack {given['stack'][:40]!r} is not known: what was usual in its year")
    if not given.get("year"):
        said.append("year not given: 2025")
    return software(given.get("stack"), given.get("year"))


def _cluster(row: Row, said: list[str]) -> tuple[Cluster, float, float, float | None]:
    given = row.get("cluster") or {}
    name = given.get("gpu")
    if not name:
        said.append("GPU not given: A100-80")
        name = "A100-80"
    written = re.match(r"([A-Za-z]+\d+X?)-(\d+)GB", name)
    memory_gib = None
    if written and not re.fullmatch(r"[\w-]+", name):
        # A variant of a known kind, with what differs in brackets or further words.
        kind, memory_gib = find_gpu(written[1], remedy=_ROW_REMEDY), float(written[2])
    else:
        kind = find_gpu(name, remedy=_ROW_REMEDY)
    hbm = float(given.get("hbm_tbps") or 0)
    clock = 1.0
    if given.get("power_limit_w"):
        usual = {"A100": 400, "H100": 700, "H200": 700, "H800": 700, "B200": 1000, "GB200": 1200, "GB300": 1400}
        limit = usual.get(kind.name.split("-")[0])
        if limit and given["power_limit_w"] < limit:
            # Power goes with the cube of the clock, as voltage follows it.
            clock = (given["power_limit_w"] / limit) ** (1 / 3)
            said.append(f"power limit {given['power_limit_w']} of {limit} W: clock {clock:.2f}, the cube root")
    per_node = given.get("per_node")
    rate = network_gbps(given.get("interconnect"), per_node or 8)
    if rate is None:
        rate = usual_network_gbps(kind)
        said.append(f"network not given: {rate:g} GB/s a GPU, as in its maker's systems")
    topology, narrowed, pod = "fat-tree", 1.0, 0
    text = f"{given.get('interconnect') or ''} {given.get('topology') or ''}".lower()
    for word, meant in (("rail", "rail-optimised"), ("dragonfly", "dragonfly"), ("torus", "torus")):
        topology = meant if word in text else topology
    if topology == "fat-tree" and given.get("topology") and not re.search(r"fat.?tree|clos", text):
        said.append(f"topology {given['topology'][:40]!r} is not known: taken for a fat tree")
    over = re.search(r"1:(\d+) oversubscription", text)
    if over:
        narrowed = float(over[1])
        pods = re.search(r"(\d+)-gpu pods", text)
        pod = int(pods[1]) // (per_node or 8) if pods else 1
    where = cluster(
        kind,
        gpus_per_node=per_node,
        nvlink_domain=given.get("nvlink_domain"),
        network_gbps=rate,
        topology=topology,
        oversubscription=narrowed,
        nodes_per_pod=pod,
    )
    return where, clock, hbm, memory_gib


def network_gbps(text: str | None, per_node: int) -> float | None:
    """One GPU's network in 10^9 bytes a second of a description such as `8x200Gb HDR per node` or `400Gb per GPU`."""
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb", text or "")
    if not found:
        return None
    bits = int(found[1] or 1) * int(found[2])
    each = (
        bits
        if "per gpu" in (text or "").lower() or (not found[1] and "per node" not in (text or ""))
        else bits / per_node
    )
    return each / 8


def _layout(parallel: Row, given: Row, said: list[str]) -> Layout:
    axes = {axis: int(parallel.get(axis) or 1) for axis in ("tp", "pp", "cp")}
    ep, dp, count = int(parallel.get("ep") or 1), parallel.get("dp"), given.get("count")
    if dp is not None and count:
        _derive_axis(axes, parallel, int(dp), int(count), said)
    tp, pp, cp = axes["tp"], axes["pp"], axes["cp"]
    if not parallel.get("tp") or not parallel.get("pp"):
        said.append(f"axes not given are 1: tp {tp}, pp {pp}, cp {cp}, ep {ep}")
    if dp is None:
        dp = max(int(count or tp * pp * cp) // (tp * pp * cp), 1)
        said.append(f"dp not given: {dp}, what the other axes leave of {count or tp * pp * cp} GPUs")
    return Layout(pp=pp, dp_shard=int(dp), cp=cp, tp=tp, ep=ep)


def _derive_axis(axes: dict[str, int], parallel: Row, dp: int, count: int, said: list[str]) -> None:
    """Gives the first of tp, pp and cp that the row leaves open what dp and the others leave of the GPUs, where that is
    whole."""
    left, rest = divmod(count, dp * math.prod(axes.values()))
    open_axes = [axis for axis in axes if not parallel.get(axis)]
    if open_axes and left > 1 and not rest:
        axes[open_axes[0]] = left
        said.append(f"{open_axes[0]} not given: {left}, what the other axes leave of {count} GPUs")


def _run(row: Row, layers: int, layout: Layout, used: Software, said: list[str]) -> RunShape:
    parallel, model = row.get("parallel") or {}, row.get("model") or {}
    seq = model.get("seq")
    if not seq:
        seq = 2048 if used.year <= 2023 else 8192
        said.append(f"sequence length not given: {seq}")
    micro, batch = _batches(parallel, layout, said)
    schedule, per_rank = _schedule(parallel, layers, layout, used, said)
    precision = _precision(parallel, used, said)
    sequence_parallel = parallel.get("seq_parallel")
    if sequence_parallel is None:
        sequence_parallel = used.year >= 2022
        if layout.tp > 1:
            said.append(
                f"sequence parallelism not given: {'on' if sequence_parallel else 'off'}, as usual in {used.year}"
            )
    recompute = str(parallel.get("recompute") or "").strip().lower()
    text = str(parallel.get("precision") or "").lower()
    half = parallel.get("mp_mode") == "PURE" or text == "fp16"
    return RunShape(
        seq_len=int(seq),
        global_batch_size=batch,
        local_batch_size=micro,
        zero=_zero(parallel, used, said),
        schedule=schedule,
        stages_per_rank=per_rank,
        recompute=recompute.startswith("full"),
        recompute_attention=recompute.startswith(("selective-attention", "selective:core")),
        recompute_share=0.5 if recompute.startswith(("selective (", "selective per", "minimal")) else 0.0,
        document_mask=False,
        reduce_bytes=2 if half else used.gradient_bytes,
        sequence_parallel=bool(sequence_parallel),
        precision=precision,
    )


def _batches(parallel: Row, layout: Layout, said: list[str]) -> tuple[int, int]:
    micro = parallel.get("micro_batch")
    batch = parallel.get("global_batch")
    steps = parallel.get("grad_accum") or parallel.get("microbatches")
    if micro is None:
        micro = 1
        if batch is not None and steps and batch % (layout.dp * steps) == 0:
            micro = batch // (layout.dp * steps)
            said.append(f"micro-batch not given: {micro}, of {batch} windows in {steps} micro-batches")
        elif layout.pp > 1:
            said.append("micro-batch not given: 1")
    if batch is None:
        steps = steps or 8 * layout.pp
        batch = micro * layout.dp * steps
        said.append(f"global batch not given: {batch}, {steps} micro-batches")
    return int(micro), int(batch)


def _schedule(parallel: Row, layers: int, layout: Layout, used: Software, said: list[str]) -> tuple[str, int]:
    written = str(parallel.get("schedule") or "")
    known = written.lower() in _SCHEDULES or written.lower().startswith(("1f1b", "interleaved"))
    if layout.pp == 1:
        if written and not known:
            said.append(f"schedule {written[:40]!r} is not known: without a pipeline there is none")
        return "1f1b", 1
    if written.lower() in _SCHEDULES:
        meant = _SCHEDULES[written.lower()]
        return meant, 2 if meant == "zbv" else 1
    per_rank = parallel.get("vp")
    if per_rank is None and (written.startswith("interleaved") or written == "1F1B-I"):
        per_rank = max(1, -(-layers // layout.pp))
        said.append(f"stages a rank not given: {per_rank}, one layer each")
    if per_rank is None and not written and used.year >= 2024:
        per_rank = max(1, layers // layout.pp // 2)
        said.append(f"schedule not given: interleaved, {per_rank} stages a rank of two layers")
    if per_rank is None:
        per_rank = 1
        if not written:
            said.append("schedule not given: 1F1B")
    if written and not known:
        said.append(f"schedule {written[:40]!r} is not known: taken for {'interleaved ' if per_rank > 1 else ''}1F1B")
    return ("interleaved_1f1b" if per_rank > 1 else "1f1b"), int(per_rank)


def _precision(parallel: Row, used: Software, said: list[str]) -> str:
    written = str(parallel.get("precision") or "").lower()
    for part, meant in _PRECISIONS:
        if part in written:
            return meant
    said.append(f"precision {written[:40]!r} is not known: bf16" if written else "precision not given: bf16")
    return "bf16"


def _zero(parallel: Row, used: Software, said: list[str]) -> int:
    written = str(parallel.get("zero") if parallel.get("zero") is not None else "").lower()
    if "no reshard" in written:
        return 2
    if "fsdp" in written or "3" in written:
        return 3
    stated = re.search(r"(?<![\d.])[0-2](?![\d.])", written)
    if stated:
        return int(stated[0])
    stage = 0 if used.year <= 2022 else 1
    said.append(f"ZeRO stage not given: {stage}")
    return stage
