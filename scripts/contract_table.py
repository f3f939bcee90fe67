"""Writes the numerics contract into docs/layouts.md: which layout equals what, within which bound, by which test.

    python scripts/contract_table.py [--check]

The rows are the cases that the tests run, read from the tests' own tables, with the tests' own bounds. --check: only
says whether the page is fresh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "layouts.md"
BEGIN, END = "<!-- contract: begin -->", "<!-- contract: end -->"
FOLDERS = ("tests", "tests/distributed/parallel", "tests/e2e")
AXES = ("pp", "dp_replicate", "cp", "tp")
# Of a case, what is not its layout and not worth saying.
NOT_SHOWN = ("parallel", "model", "world_size")
SAID = {"float8": "fp8", "reference": "model", "dtype": "", "attn_backend": "attention", "compile": "compiled"}


def main(arguments: list[str]) -> int:
    """1 where the page is not fresh."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page = f"{before}{BEGIN}\n{contract()}\n{END}{after}"
    if page == PAGE.read_text(encoding="utf-8"):
        return 0
    if "--check" in arguments:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} is not fresh: run python scripts/contract_table.py\n")
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


def contract() -> str:
    """The tables, in Markdown."""
    for folder in reversed(FOLDERS):
        sys.path.insert(0, str(ROOT / folder))
    try:
        import parity
        import test_expert_parity
        import test_float8_parity
        import test_latent_parity
        import test_offload
        import test_own_parity
        import test_parity
        import test_run
    finally:
        for folder in FOLDERS:
            sys.path.remove(str(ROOT / folder))
    return "\n".join(
        [
            *_one_process(test_parity, parity.MODEL),
            *_experts(test_expert_parity, test_parity),
            *_latents(test_latent_parity, test_parity),
            *_float8(test_float8_parity, test_parity),
            *_own_models(test_own_parity),
            *_same_bits(test_offload, test_run),
            *_resumed(test_run),
            "",
            f"**Refused in one line**, before a step runs (`{_test(test_parity, 'refused_in_one_line')}`): "
            + "; ".join(test_parity.REFUSED)
            + ".",
        ]
    )


def _one_process(parity: ModuleType, base: Mapping[str, Any]) -> Iterator[str]:
    """Every case of the parity table. base: the model that most of them have."""
    fp32, loss, gradient = parity.FP32_BOUND, parity.BF16_LOSS_BOUND, parity.BF16_GRADIENT_BOUND
    yield ""
    yield (
        "**Equal to one process in fp32**: losses of two training steps and two evaluations, each parameter's gradient "
        f"and their norm, and the initial weights bit for bit. Within {fp32:g} relative; computed in bfloat16, "
        f"{loss:g} of the loss and {gradient:g} of gradients. Models: base {_named(base)}; "
        + "; ".join(f"{name} with {_named(args)}" for name, args in parity.REFERENCES.items() if args)
        + "."
    )
    for words, table, test in (
        ("Run by", parity.TABLE, "every_layout_gives"),
        ("Further ones, by", parity.LONG, "further_layouts_give"),
        ("Compiled blocks, by", {2: parity.COMPILED}, "compiled_blocks_give"),
    ):
        yield from _table(f"{words} `{_test(parity, test)}`:", table, parity._case())


def _experts(experts: ModuleType, parity: ModuleType) -> Iterator[str]:
    named = "; ".join(f"{name} with {_named(model['moe'])}" for name, model in experts.MODELS.items())
    words = (
        "**Mixtures of experts**, equal to one process in fp32: as above, with the gradients of the loss of balance, "
        f"and the tokens that each expert of each layer had, to the last one; within {parity.FP32_BOUND:g} relative, "
        f"by `{_test(experts, 'every_layout_of_experts')}`. Models: {named}."
    )
    yield from _table(words, experts.TABLE, parity._case())
    compiled = f"Compiled blocks around experts, by `{_test(experts, 'compiled_blocks_of_experts')}`:"
    yield from _table(compiled, {2: experts.COMPILED}, parity._case())


def _latents(latents: ModuleType, parity: ModuleType) -> Iterator[str]:
    named = "; ".join(
        f"{name} with {_named(model['mla'])}"
        + (f", experts after dense layers ({model['moe']['first_k_dense']})" if "moe" in model else "")
        for name, model in latents.MODELS.items()
    )
    words = (
        "**Latent attention and dense layers before the experts**, equal to one process in fp32: as above, by "
        f"`{_test(latents, 'every_layout_of_latent')}`. Models: {named}."
    )
    yield from _table(words, latents.TABLE, parity._case())
    yield from _table(f"Compiled, by `{_test(latents, 'compiled_blocks')}`:", {1: latents.COMPILED}, parity._case())


def _float8(float8: ModuleType, parity: ModuleType) -> Iterator[str]:
    usual = {key: value for key, value in parity._case(dtype="bfloat16").items() if key != "reference"}
    same, apart = _test(float8, "every_layout_in_fp8"), _test(float8, "ranks_that_multiply")
    words = (
        "**Products in fp8**, equal to one process that casts with torch alone: losses of two training steps and two "
        f"evaluations within {float8.LOSS_BOUND:g} relative, and each parameter's gradient within "
        f"{float8.GRADIENT_BOUND:g}, by `{same}`. Model: base with {_named(float8.SHAPE)}."
    )
    yield from _table(words, float8.TABLE, usual)
    words = (
        "Experts, whose products and whose router's stay in bfloat16, within the same bounds and with equal counts, by "
        f"`{_test(float8, 'experts_over_ranks')}`:"
    )
    yield from _table(words, {2: float8.OF_EXPERTS}, usual)
    words = (
        "Where a rank multiplies slices of what one process multiplies, or more windows at once, its scales are "
        f"others: gradients within {float8.OWN_SCALES_BOUND:g}, by `{apart}`:"
    )
    yield from _table(words, float8.OWN_SCALES, usual)
    same, apart = _test(float8, "compiled_blocks_in_fp8"), _test(float8, "compiled_blocks_that")
    near = _test(float8, "one_process_that_compiles_products")
    words = (
        f"Compiled blocks, of {float8.SHALLOW['n_layers']} layers, equal to one process that compiles them: gradients "
        f"within {float8.GRADIENT_BOUND:g}, by `{same}`; that one has gradients within {float8.OWN_SCALES_BOUND:g} of "
        f"one that casts with torch alone, by `{near}`:"
    )
    yield from _table(words, {2: float8.COMPILED}, usual)
    words = f"Of those with scales of their own, within {float8.OWN_SCALES_BOUND:g}, by `{apart}`:"
    yield from _table(words, {2: float8.COMPILED_OWN_SCALES}, usual)


def _own_models(own: ModuleType) -> Iterator[str]:
    words = (
        "**A model, a loss and a metric of one's own**, equal to one process in fp32: loss, metric, gradients and "
        f"their norm, within {own.BOUND:g} relative, by `{_test(own, 'every_layout_of_an_own_model')}`:"
    )
    yield from _table(words, own.TABLE, own._case())


def _same_bits(offload: ModuleType, run: ModuleType) -> Iterator[str]:
    words = (
        "**The same bits**: a run that is stopped and resumed in its layout goes on as if it had not been "
        f"(`{_test(run, 'resume_in_the_same_layout')}`); losses, norms, weights and moments after several clipped "
        f"updates with `cpu_offload` are those without it, by `{_test(offload, 'offloaded_training_is_the_same')}`:"
    )
    yield from _table(words, offload.CASES, offload._case())


def _resumed(run: ModuleType) -> Iterator[str]:
    bounds = " and ".join(f"{bound:g} ({precision})" for precision, bound in run.BOUNDS.items())
    layouts = "; ".join(run.RELAYOUT)
    yield ""
    yield (
        f"**One run in one layout after the other** ({layouts}) gives the losses of one process within {bounds} "
        f"relative, each window trained on once (`{_test(run, 'resume_in_other_layouts')}`); so do other stages of a "
        f"pipeline, with tied embeddings (`{_test(run, 'loads_into_other_stages')}`)."
    )


def _table(words: str, table: Mapping[int, Mapping[str, Mapping[str, Any]]], usual: Mapping[str, Any]) -> Iterator[str]:
    """usual: a case of which nothing was said, whose values are not shown."""
    yield from ("", words, "", "| ranks | layout | beside it | case |", "|---:|---|---|---|")
    for size, cases in table.items():
        for name, case in cases.items():
            beside = ", ".join(_beside(case, usual)) or "-"
            yield f"| {size} | {_layout(size, case['parallel'])} | {beside} | `{name}` |"


def _named(args: Mapping[str, Any]) -> str:
    return ", ".join(_said(key, value["type"] if isinstance(value, dict) else value) for key, value in args.items())


def _layout(size: int, parallel: Mapping[str, Any]) -> str:
    sizes = {axis: parallel.get(axis, 1) for axis in AXES}
    rest = size
    for each in sizes.values():
        rest //= each
    sizes = {"pp": sizes["pp"], "dp_replicate": sizes["dp_replicate"], "dp_shard": rest, **sizes}
    said = " x ".join(f"{axis} {each}" for axis, each in sizes.items() if each > 1) or "one rank"
    keys = {"zero": 3, **{key: value for key, value in parallel.items() if key not in AXES}}
    return ", ".join([said, *(_said(key, value) for key, value in keys.items())])


def _beside(case: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    for key, value in case.items():
        if key not in NOT_SHOWN and value != usual.get(key) and (key != "reference" or key in usual):
            yield _said(SAID.get(key, key), value)


def _said(key: str, value: object) -> str:
    return key if value is True else str(value) if key in ("", "schedule") else f"{key} {value}"


def _test(module: ModuleType, part: str) -> str:
    """The one test of a module whose name has this part."""
    (found,) = [name for name in dir(module) if name.startswith("test_") and part in name]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
