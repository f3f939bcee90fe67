"""The numerics contract of products in fp8: every layout gives the loss and the gradients of one process that computes
them with torch alone; compiled, of one that is compiled too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import MODEL, SEED, by_stored_name, names_of, windows
from safetensors.torch import load_file, save_file
from support.float8_reference import loss_and_gradients, narrow_layers, require_torchao
from test_parity import _case, _gangs, _pipeline

from phalanx.core.box import whole
from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.parallel.float8 import Float8Product, narrow_linears
from phalanx.parallel.initialise import fill
from phalanx.parallel.sharding import prepare_blocks
from phalanx.parallel.tensor import TensorSlices
from phalanx.spec.parallel import ActivationCheckpoint

pytestmark = pytest.mark.distributed

RECIPES = ("tensorwise", "rowwise")
# Where each product has the numbers that one process gives it, scales are the same and little but the order of sums
# differs. Where a rank multiplies a slice, or windows meet in a micro-batch, it has a scale of its own.
LOSS_BOUND, GRADIENT_BOUND, OWN_SCALES_BOUND = 1e-3, 0.05, 0.2
SHAPE: dict[str, Any] = {"dim": 64, "ffn_dim": 96}  # multiples of 16, halved over tp too


def _of(recipe: str, case: dict[str, Any]) -> dict[str, Any]:
    return case | {"reference": recipe, "model": SHAPE, "float8": recipe, "dtype": "bfloat16"}


TABLE: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one": _of("tensorwise", _case()),
        "one_rowwise": _of("rowwise", _case()),
        "recompute_selective": _of("tensorwise", _case(recompute="selective")),
        "recompute": _of("rowwise", _case(recompute="full")),
    },
    2: {
        "dp2": _of("tensorwise", _case()),
        "dp2_rowwise": _of("rowwise", _case()),
        "dp2_zero1_chunked": _of("rowwise", _case(zero=1, chunk_tokens=5)),
        "replicate2_zero2": _of("tensorwise", _case(dp_replicate=2, zero=2)),
        "pp2": _of("tensorwise", _pipeline("1f1b", pp=2)),
        "pp2_interleaved_rowwise": _of("rowwise", _pipeline("interleaved_1f1b", pp=2)),
    },
}
OWN_SCALES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp2_local2": _of("tensorwise", _case(local_batch_size=2)),
        "tp2": _of("tensorwise", _case(tp=2)),
        "tp2_rowwise": _of("rowwise", _case(tp=2)),
        "cp2": _of("tensorwise", _case(cp=2, local_batch_size=2)),
        "cp2_rowwise": _of("rowwise", _case(cp=2, local_batch_size=2)),
    },
}
# Attention and shared experts multiply in fp8, routers and experts in bfloat16.
EXPERTS: dict[str, Any] = SHAPE | {
    "ffn_dim": 0,
    "moe": {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32, "num_shared_experts": 1},
}


def _of_experts(recipe: str, case: dict[str, Any]) -> dict[str, Any]:
    return _of(recipe, case) | {"model": EXPERTS}


OF_EXPERTS = {
    "ep2": _of_experts("tensorwise", _case(ep=2)),
    "ep2_rowwise_recompute": _of_experts("rowwise", _case(ep=2, recompute="full")),
    "dp2_experts": _of_experts("tensorwise", _case(zero=1)),
}
# Of one case and its reference: casts and scales make far more for C++'s compiler than blocks without them do.
COMPILE_TIMEOUT_S = 480
# A compiler rounds to bfloat16 at fewer places, so the reference is compiled too. That takes long: of two layers.
SHALLOW = SHAPE | {"n_layers": 2}


def _compiled(recipe: str, case: dict[str, Any]) -> dict[str, Any]:
    return _of(recipe, case) | {"model": SHALLOW, "compile": True}


COMPILED = {
    "dp2_compiled": _compiled("tensorwise", _case()),
    "dp2_rowwise_compiled": _compiled("rowwise", _case(zero=1, recompute="full")),
    "pp2_compiled": _compiled("tensorwise", _pipeline("1f1b", pp=2)),
}
COMPILED_OWN_SCALES = {
    "tp2_compiled": _compiled("tensorwise", _case(tp=2)),
    "tp2_rowwise_compiled": _compiled("rowwise", _case(tp=2)),
    "cp2_compiled": _compiled("tensorwise", _case(cp=2, local_batch_size=2)),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    require_torchao()
    folder = tmp_path_factory.mktemp("references")
    return {recipe: _written(folder, recipe, SHAPE, compiled=False) for recipe in RECIPES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled references, each of which is there from the first test on that asks for it."""
    require_torchao()
    return tmp_path_factory.mktemp("compiled")


def _written(folder: Path, recipe: str, model: Mapping[str, Any], *, compiled: bool) -> str:
    """Path of a recipe's reference, as safetensors. compiled: block by block, as a rank compiles, around torchao's
    products, since what a compiler makes depends on how they are written down.
    """
    path = folder / f"{recipe}.safetensors"
    if path.exists():
        return str(path)
    decoder = Decoder(DecoderArgs.of_plain(MODEL | dict(model)))
    weights, initial = decoder.state_dict(), decoder.initial_weights()
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        fill(weight, whole(shape), shape, initial[name], SEED, name)
    weights = {name: weight.clone() for name, weight in weights.items()}
    if compiled:
        narrow_linears(decoder, TensorSlices.of(decoder), Float8Product.of(recipe, torch.device("cpu")))
        prepare_blocks(decoder, ActivationCheckpoint(), compiled=True)
    else:
        narrow_layers(decoder, recipe)
    loss, gradients = loss_and_gradients(decoder, windows(MODEL["vocab_size"]), weights)
    found = {f"weight/{name}": weight for name, weight in weights.items()}
    found |= {f"gradient/{name}": gradient.clone() for name, gradient in by_stored_name(decoder, gradients).items()}
    if decoder.routers:
        counts, losses = zip(*(each.balance.take(loss.device) for each in decoder.routers.values()), strict=True)
        found |= {"expert_counts": torch.stack(counts), "balance_loss": torch.stack(losses).sum()}
    save_file({"loss": loss, **found}, path)
    return str(path)


@pytest.mark.parametrize(("world_size", "names"), _gangs(TABLE))
def test_every_layout_in_fp8_gives_loss_and_gradients_of_one_process(
    fork_server: ForkServer, references: dict[str, str], world_size: int, names: list[str]
) -> None:
    cases = {name: TABLE[world_size][name] for name in names}
    _check(fork_server, references, world_size, cases, 0.0, GRADIENT_BOUND)


def test_experts_over_ranks_in_fp8_give_loss_and_gradients_of_one_process(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    require_torchao()
    references = {recipe: _written(tmp_path, recipe, EXPERTS, compiled=False) for recipe in RECIPES}
    _check(fork_server, references, 2, OF_EXPERTS, 0.0, GRADIENT_BOUND)


def test_ranks_that_multiply_slices_in_fp8_stay_near_one_process(
    fork_server: ForkServer, references: dict[str, str]
) -> None:
    _check(fork_server, references, 2, OWN_SCALES[2], 1e-3, OWN_SCALES_BOUND)


@pytest.mark.long
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_in_fp8_give_loss_and_gradients_of_one_process_that_compiles(
    fork_server: ForkServer, folder: Path, name: str
) -> None:
    _check_compiled(fork_server, folder, name, COMPILED[name], 0.0, GRADIENT_BOUND)


@pytest.mark.long
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.parametrize("name", COMPILED_OWN_SCALES)
def test_compiled_blocks_that_multiply_slices_in_fp8_stay_near_one_process_that_compiles(
    fork_server: ForkServer, folder: Path, name: str
) -> None:
    _check_compiled(fork_server, folder, name, COMPILED_OWN_SCALES[name], 1e-3, OWN_SCALES_BOUND)


@pytest.mark.long
@pytest.mark.timeout(COMPILE_TIMEOUT_S)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_that_compiles_products_in_fp8_stays_near_one_that_casts_with_torch_alone(
    folder: Path, tmp_path: Path, recipe: str
) -> None:
    found = load_file(_written(folder, recipe, SHALLOW, compiled=True))
    expected = load_file(_written(tmp_path, recipe, SHALLOW, compiled=False))
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=LOSS_BOUND)
    for name in names_of(expected):
        gradient = expected[f"gradient/{name}"]
        error = (found[f"gradient/{name}"] - gradient).norm() / gradient.norm()
        assert error <= OWN_SCALES_BOUND, name


def _check_compiled(
    fork_server: ForkServer, folder: Path, name: str, case: dict[str, Any], least: float, bound: float
) -> None:
    references = {case["reference"]: _written(folder, case["float8"], SHALLOW, compiled=True)}
    _check(fork_server, references, 2, {name: case}, least, bound, COMPILE_TIMEOUT_S - 120)


def _check(
    fork_server: ForkServer,
    references: dict[str, str],
    world_size: int,
    cases: dict[str, dict[str, Any]],
    least: float,
    bound: float,
    timeout_s: float = 110,
) -> None:
    """least: of the worst gradient's relative error; scales of its own must show."""
    arguments = {"cases": cases, "references": references}
    rows = run_gang(fork_server, world_size, "parity:run_table", arguments, timeout_s=timeout_s)[0]
    assert rows.keys() == cases.keys()
    for name, row in rows.items():
        expected = float(load_file(references[cases[name]["reference"]])["loss"])
        assert row["weights_equal"] and row["counts_equal"], name
        assert row["losses"] == pytest.approx([expected] * 4, rel=LOSS_BOUND), name
        assert least <= max(row["gradient_errors"].values()) <= bound, (name, row["gradient_errors"])
