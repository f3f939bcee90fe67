"""Rules of latent attention: what of a decoder's shape it replaces. Pure; values only."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.spec.finding import Finding
from phalanx.spec.model import ModelArgs

_TABLE = "model.args.mla"
_SCALING = "model.args.rope_scaling."


def latent_findings(args: ModelArgs) -> Iterator[Finding]:
    """What doesn't go together in and with `[model.args.mla]`."""
    yield from _magnitudes(args)
    mla = args.mla
    if mla is None:
        return
    if mla.qk_rope_head_dim % 2:
        yield Finding(
            (f"{_TABLE}.qk_rope_head_dim",), mla.qk_rope_head_dim, "an even width: positions turn pairs", "change it"
        )
    if args.head_dim != mla.head_dim:
        yield Finding(
            ("model.args.head_dim", f"{_TABLE}.qk_nope_head_dim", f"{_TABLE}.qk_rope_head_dim"),
            args.head_dim,
            f"qk_nope_head_dim + qk_rope_head_dim = {mla.head_dim} beside [model.args.mla]",
            "remove it",
        )
    if args.n_kv_heads != args.n_heads:
        yield Finding(
            ("model.args.n_kv_heads", "model.args.n_heads", _TABLE),
            args.n_kv_heads,
            f"n_heads = {args.n_heads} beside [model.args.mla], where each head has keys and values of its own",
            "remove it",
        )
    for name in ("qk_norm", "qkv_bias"):
        if getattr(args, name):
            yield Finding(
                (f"model.args.{name}", _TABLE),
                True,
                "false beside [model.args.mla], which normalises latents and has no biases",
                "remove it, or the mla table",
            )


def _magnitudes(args: ModelArgs) -> Iterator[Finding]:
    """Those of YaRN that DeepSeek has in two keys."""
    scaling = args.rope_scaling
    if scaling is None or scaling.type != "yarn":  # other types refuse both
        return
    keys = {name: getattr(scaling, name) for name in ("mscale", "mscale_all_dim")}
    given = [name for name, value in keys.items() if value is not None]
    if given and args.mla is None:
        yield Finding(
            (f"{_SCALING}{given[0]}", _TABLE),
            keys[given[0]],
            "none without [model.args.mla], where attention_factor says it",
            "remove it, or set attention_factor",
        )
    elif len(given) == 1:
        (other,) = keys.keys() - set(given)
        yield Finding(
            (f"{_SCALING}{other}", f"{_SCALING}{given[0]}"), None, f"a value beside {given[0]}", "set both or neither"
        )
