"""Rules of a mixture of experts: how many there are, of which a token takes how many, over how many ranks. Pure; values
only."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec.experts import MoeArgs
from phalanx.spec.finding import Finding
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs
from phalanx.spec.parallel import Parallel

_TABLE = "model.args.moe."


def expert_findings(args: ModelArgs, parallel: Parallel, layout: Layout | None) -> Iterator[Finding]:
    """What doesn't go together in `[model.args.moe]` and with `parallel.ep`."""
    if args.moe is None:
        if not args.ffn_dim:
            yield Finding(
                ("model.args.ffn_dim",), 0, "a positive width", "set it, choose a preset, or add [model.args.moe]"
            )
        if parallel.ep > 1:
            yield Finding(
                ("parallel.ep", "model.args.moe"),
                parallel.ep,
                "1 for a model without experts",
                "remove it, or add [model.args.moe]",
            )
        return
    yield from _dense_layers(args, args.moe)
    yield from _choice(args.moe)
    yield from _ranks(args.moe, parallel.ep, layout)


def _dense_layers(args: ModelArgs, moe: MoeArgs) -> Iterator[Finding]:
    if args.ffn_dim and not moe.first_k_dense:
        yield Finding(
            ("model.args.ffn_dim",),
            args.ffn_dim,
            "none beside [model.args.moe], where every layer's feed-forward is experts",
            "remove it, or the moe table; the width of an expert is model.args.moe.expert_ffn_dim",
        )
    if moe.first_k_dense and not args.ffn_dim:
        yield Finding(
            ("model.args.ffn_dim", f"{_TABLE}first_k_dense"),
            0,
            f"a positive width of the {moe.first_k_dense} dense layers before the experts",
            "set it, or first_k_dense = 0",
        )
    if moe.first_k_dense >= args.n_layers:
        yield Finding(
            (f"{_TABLE}first_k_dense", "model.args.n_layers"),
            moe.first_k_dense,
            f"less than n_layers = {args.n_layers}",
            "lower it, or remove the moe table for a dense model",
        )


def _choice(moe: MoeArgs) -> Iterator[Finding]:
    if moe.top_k > moe.num_experts:
        yield Finding(
            (f"{_TABLE}top_k", f"{_TABLE}num_experts"),
            moe.top_k,
            f"at most num_experts = {moe.num_experts}",
            "lower top_k or add experts",
        )
    if moe.num_experts % moe.num_groups:
        yield Finding(
            (f"{_TABLE}num_groups", f"{_TABLE}num_experts"),
            moe.num_groups,
            f"a divisor of num_experts = {moe.num_experts}",
            "change num_groups",
        )
    elif moe.top_groups > moe.num_groups:
        yield Finding(
            (f"{_TABLE}top_groups", f"{_TABLE}num_groups"),
            moe.top_groups,
            f"at most num_groups = {moe.num_groups}",
            "lower top_groups, or raise num_groups",
        )
    elif moe.top_k > moe.top_groups * (moe.num_experts // moe.num_groups):
        yield Finding(
            (f"{_TABLE}top_groups", f"{_TABLE}num_groups", f"{_TABLE}top_k"),
            moe.top_groups,
            f"groups that hold top_k = {moe.top_k} experts, at {moe.num_experts // moe.num_groups} a group",
            "raise top_groups, or lower num_groups or top_k",
        )


def _ranks(moe: MoeArgs, ep: int, layout: Layout | None) -> Iterator[Finding]:
    if moe.num_experts % ep:
        yield Finding(
            ("parallel.ep", f"{_TABLE}num_experts"),
            ep,
            f"a divisor of num_experts = {moe.num_experts}",
            "change parallel.ep",
        )
    if layout is not None and (layout.dp_shard * layout.cp) % ep:
        yield Finding(
            ("parallel.ep", "parallel.dp_shard", "parallel.cp"),
            ep,
            f"a divisor of dp_shard x cp = {layout.dp_shard * layout.cp}, over which experts are spread",
            "change ep or dp_shard",
        )
