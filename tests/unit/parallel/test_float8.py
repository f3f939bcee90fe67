"""Products in fp8 have the bits of the same products written down with torch alone, and lie near those of bfloat16."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from support.float8_reference import loss_and_gradients, narrow_layers, product, require_torchao
from torch import Tensor, nn

from phalanx.core.box import whole
from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.parallel.float8 import Float8Product, is_emulated, narrow_linears, require_linears
from phalanx.parallel.initialise import fill
from phalanx.parallel.precision import widen_linears
from phalanx.parallel.tensor import RowwiseLinear, TensorSlices

require_torchao()

CPU = torch.device("cpu")
RECIPES = ("tensorwise", "rowwise")
ARGS = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 96, "qkv_bias": True}
# Of the norm of a bfloat16 gradient; e5m2, in which tensorwise rounds gradients, has two bits of mantissa.
GRADIENT_BOUNDS = {"tensorwise": 0.15, "rowwise": 0.1}


def _drawn(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std).bfloat16()


def _results(multiply: Any, x: Tensor, weight: Tensor, gradient: Tensor) -> list[Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = multiply(x, weight)
    y.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("shape", [(2, 16, 64, 48), (1, 16, 16, 16), (3, 32, 16, 128)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_product_and_its_gradients_have_the_bits_of_torchs_own_casts(recipe: str, shape: tuple[int, ...]) -> None:
    windows, length, width, out = shape
    x, weight = _drawn(windows, length, width, seed=1), _drawn(out, width, seed=2, std=0.1)
    gradient = _drawn(windows, length, out, seed=3, std=1e-4)
    ours = _results(Float8Product.of(recipe, CPU), x, weight, gradient)
    theirs = _results(lambda a, b: product(a, b, recipe), x, weight, gradient)
    plain = _results(lambda a, b: (a.float() @ b.float().T).bfloat16(), x, weight, gradient)
    for mine, other, wide in zip(ours, theirs, plain, strict=True):
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, other)
        assert 1e-3 < (mine.float() - wide.float()).norm() / wide.float().norm() < 0.08


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_product_and_its_gradients_have_the_same_bits(recipe: str) -> None:
    multiply = Float8Product.of(recipe, CPU)
    given = _drawn(2, 16, 64, seed=1), _drawn(48, 64, seed=2, std=0.1), _drawn(2, 16, 48, seed=3, std=1e-4)
    compiled = torch.compile(lambda x, weight: multiply(x, weight))
    for mine, other in zip(_results(compiled, *given), _results(multiply, *given), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_extreme_values_stay_finite(recipe: str, value: float) -> None:
    x = torch.full((1, 16, 16), value, dtype=torch.bfloat16)
    found = _results(Float8Product.of(recipe, CPU), x, _drawn(16, 16, seed=1), _drawn(1, 16, 16, seed=2))
    assert all(torch.isfinite(each).all() for each in found)


def _decoder() -> Decoder:
    decoder = Decoder(DecoderArgs.of_plain(ARGS))
    initial = decoder.initial_weights()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            shape = tuple(parameter.shape)
            fill(parameter, whole(shape), shape, initial[name], 1, name)
    return decoder


def _gradients(decoder: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    drawn = torch.randint(0, 96, (2, 33), generator=torch.Generator().manual_seed(3))
    positions, documents = torch.arange(32).expand(2, -1), torch.arange(32).expand(2, -1) // 20
    batch = (drawn[:, :-1], drawn[:, 1:], positions, documents)
    return loss_and_gradients(decoder, batch, {name: each.clone() for name, each in decoder.state_dict().items()})


@pytest.mark.parametrize("recipe", RECIPES)
def test_decoder_has_the_gradients_of_torchs_own_casts_and_near_those_of_bfloat16(recipe: str) -> None:
    plain, ours, theirs = _decoder(), _decoder(), _decoder()
    narrow_layers(theirs, recipe)
    assert narrow_linears(ours, TensorSlices.of(ours), Float8Product.of(recipe, CPU)) == 2 * 7
    for decoder in (plain, ours, theirs):
        widen_linears(decoder)
    (loss, wide), (ours_loss, found), (theirs_loss, expected) = map(_gradients, (plain, ours, theirs))
    assert torch.equal(ours_loss, theirs_loss)
    assert all(torch.equal(found[name], expected[name]) for name in wide)
    assert 0 < abs(ours_loss - loss) < 1e-3 * loss
    errors = {name: float((found[name] - each).norm() / each.norm()) for name, each in wide.items()}
    hidden = {name: error for name, error in errors.items() if not name.endswith("wk.bias")}  # nought but for rounding
    assert max(hidden.values()) < GRADIENT_BOUNDS[recipe], hidden
    assert max(hidden.values()) > 0.01


def test_names_and_parameters_are_those_without_fp8() -> None:
    plain, ours = _decoder(), _decoder()
    before = dict(ours.named_parameters())
    narrow_linears(ours, TensorSlices.of(ours), Float8Product.of("rowwise", CPU))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert all(parameter is before[name] for name, parameter in ours.named_parameters())
    assert all(each.dtype == torch.float32 for each in ours.state_dict().values())


def test_head_router_experts_and_odd_sizes_keep_their_products() -> None:
    moe = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "num_shared_experts": 1}
    sparse = Decoder(DecoderArgs.of_plain(ARGS | {"moe": moe, "n_kv_heads": 1, "head_dim": 8}))
    kinds = {name: type(each) for name, each in sparse.named_modules()}
    # wq, wo and the shared expert's three; keys and values are 8 wide.
    assert narrow_linears(sparse, TensorSlices.of(sparse), Float8Product.of("rowwise", CPU)) == 2 * 5
    changed = {name.rpartition(".")[2] for name, each in sparse.named_modules() if type(each) is not kinds[name]}
    assert changed == {"wq", "wo", "w1", "w2", "w3"}
    assert type(sparse.output) is nn.Linear
    kept = [name for name, each in sparse.named_modules() if type(each) is nn.Linear]
    assert {name.rpartition(".")[2] for name in kept} == {"wk", "wv", "output"}


def test_a_slice_that_is_no_multiple_is_refused() -> None:
    decoder = _decoder()
    slices = TensorSlices.of(decoder)
    linear = decoder.get_submodule("layers.0.feed_forward.w1")
    linear.weight = nn.Parameter(linear.weight[:24].detach().clone())
    with pytest.raises(PhalanxError, match=r"^\[parallel\] tp is 4: .*multiples of 16 of layers\.0\.feed_forward\.w1"):
        narrow_linears(decoder, slices, Float8Product.of("rowwise", CPU))


def test_a_rowwise_cut_module_multiplies_in_fp8_before_it_exchanges() -> None:
    decoder = _decoder()
    module = decoder.get_submodule("layers.0.feed_forward.w2")
    module.__class__ = RowwiseLinear
    narrow_linears(decoder, TensorSlices.of(decoder), Float8Product.of("rowwise", CPU))
    assert isinstance(module, RowwiseLinear) and isinstance(module.product, Float8Product)
    assert not isinstance(RowwiseLinear.product, Float8Product), "of this module alone"


class _Own(nn.Module):
    def __init__(self, width: int, name: str = "layers") -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList([nn.Sequential(nn.Linear(width, 2 * width))]))
        self.head = nn.Linear(16, 16)


@pytest.mark.parametrize(("model", "is_right"), [(_Own(16), True), (_Own(12), False), (_Own(16, "blocks"), False)])
def test_a_model_with_nothing_to_compute_in_fp8_is_refused(model: nn.Module, is_right: bool) -> None:
    if is_right:
        require_linears(model)
        return
    with pytest.raises(PhalanxError, match=r"^training\.float8_recipe: expected none with _Own.*`layers`"):
        require_linears(model)


def test_cpus_and_old_gpus_emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_emulated(CPU)
    for capability, expected in (((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        assert is_emulated(torch.device("cuda")) is expected
    assert not Float8Product.of("rowwise", torch.device("cuda")).config.emulate
    assert Float8Product.of("tensorwise", CPU).config.emulate


def test_torchaos_import_tells_nothing_that_a_user_must_not_read(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchao")
    level = logger.level
    Float8Product.of("rowwise", CPU)
    assert logger.level == level and not caplog.records
    assert importlib.util.find_spec("torchao") is not None
