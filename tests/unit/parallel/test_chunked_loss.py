"""Cross-entropy a chunk of tokens at a time: the numbers of whole logits, without their memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.parallel import ParallelModel, SlotBatch, build_mesh
from phalanx.parallel.loss import chunked_cross_entropy, token_sum_cross_entropy
from phalanx.spec import parse_job


def _drawn(
    windows: int, length: int, dim: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(windows, length, dim, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (windows, length), generator=generator)
    targets[torch.rand(windows, length, generator=generator) < 0.3] = -100
    return hidden, weight, targets


@settings(deadline=None, max_examples=50)
@given(
    windows=st.integers(1, 3),
    length=st.integers(1, 9),
    vocab=st.integers(1, 40),
    chunk=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_loss_and_gradients_equal_torchs(windows: int, length: int, vocab: int, chunk: int, seed: int) -> None:
    hidden, weight, targets = _drawn(windows, length, 6, vocab, seed)
    loss = chunked_cross_entropy(hidden, weight, targets, chunk)
    (loss / 7).backward()
    theirs = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = theirs[0] @ theirs[1].t()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    (expected / 7).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, other in zip((hidden, weight), theirs, strict=True):
        assert ours.grad is not None and other.grad is not None
        torch.testing.assert_close(ours.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


def test_loss_in_bfloat16_rounds_logits_as_a_head_does() -> None:
    hidden, weight, targets = _drawn(2, 16, 8, 50, 1, torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight, targets, 5)
    loss.backward()
    logits = F.linear(hidden.detach().float(), weight.detach().float()).bfloat16().requires_grad_()
    whole = token_sum_cross_entropy(logits, targets)
    whole.backward()
    torch.testing.assert_close(loss, whole)
    assert logits.grad is not None and weight.grad is not None
    by_whole = logits.grad.flatten(0, 1).float().t() @ hidden.detach().flatten(0, 1).float()
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad, by_whole.bfloat16(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("of_hidden", "of_weight"), [(True, False), (False, True)])
def test_one_gradient_alone_is_the_one_of_both(of_hidden: bool, of_weight: bool) -> None:
    """A zero-bubble schedule asks for them one after the other."""
    hidden, weight, targets = _drawn(1, 6, 4, 9, 3)
    both = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, 4), (hidden, weight))
    one = chunked_cross_entropy(
        hidden.detach().requires_grad_(of_hidden), weight.detach().requires_grad_(of_weight), targets, 4
    )
    assert one.requires_grad
    loss = chunked_cross_entropy(hidden, weight, targets, 4)
    (found,) = torch.autograd.grad(loss, (hidden,) if of_hidden else (weight,))
    assert torch.equal(found, both[0] if of_hidden else both[1])


class _Memory(TorchDispatchMode):
    """Counts the bytes of storages that operations make, and the most that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: set[int] = set()

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.alive -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.alive += storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return found


def _peak_bytes(loss: Callable[[], Tensor]) -> int:
    with _Memory() as memory:
        loss().backward()
    return memory.peak


def test_logits_of_all_tokens_never_exist() -> None:
    tokens, dim, vocab, chunk = 512, 16, 2048, 32
    hidden, weight, targets = _drawn(1, tokens, dim, vocab, 5)
    of_logits = tokens * vocab * 4
    whole = _peak_bytes(lambda: token_sum_cross_entropy(F.linear(hidden, weight), targets))
    hidden.grad = weight.grad = None
    chunked = _peak_bytes(lambda: chunked_cross_entropy(hidden, weight, targets, chunk))
    assert whole >= 2 * of_logits, "the measure sees logits where there are any"
    of_chunk, of_gradients = chunk * vocab * 4, (vocab + tokens) * dim * 4
    assert chunked <= 4 * of_chunk + 3 * of_gradients < of_logits


WINDOWS, SEQ_LEN, VOCAB_SIZE, DIM = 2, 128, 512, 16


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def right_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """A metric: how many tokens are right."""
    assert logits.shape[1:] == (SEQ_LEN, VOCAB_SIZE), "metrics see whole windows"
    return (logits.argmax(-1) == targets).sum().float()


def _model(chunk_tokens: int, metrics: dict[str, str]) -> ParallelModel:
    shape = {"dim": DIM, "n_layers": 2, "n_heads": 2, "ffn_dim": 32, "vocab_size": VOCAB_SIZE}
    job = parse_job(
        {
            "job": {"name": "chunks", "storage": "memory://chunks"},
            "model": {"args": shape, "attn_backend": "varlen"},
            "data": {"train": "memory://chunks/train"},
            "training": {"seq_len": SEQ_LEN, "steps": 1, "global_batch_size": WINDOWS}
            | {"mixed_precision_param": "float32"},
            "optimizer": {"lr": 0.1},
            "parallel": {"local_batch_size": WINDOWS},
            "loss": {"chunk_tokens": chunk_tokens},
            "metrics": {"fn": metrics},
        }
    )
    layout = job.layout(1)
    return ParallelModel(job, layout, build_mesh(layout, "cpu"), "cpu")


def _batch() -> tuple[SlotBatch, int]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, VOCAB_SIZE, (2, WINDOWS, SEQ_LEN), generator=generator)
    targets[:, ::5] = -100
    documents = torch.arange(SEQ_LEN).expand(WINDOWS, -1) // 20
    batch = SlotBatch(tokens, targets, torch.arange(SEQ_LEN).expand(WINDOWS, -1), documents, 1)
    return batch, int((targets != -100).sum())


@pytest.mark.usefixtures("group_of_one")
def test_step_and_evaluation_of_a_model_never_hold_the_logits_of_a_micro_batch() -> None:
    largest = {}
    for chunk_tokens in (0, 8):
        model, (batch, valid_tokens) = _model(chunk_tokens, {}), _batch()
        with _Memory() as memory:
            model.forward_backward(batch, valid_tokens)
            model.evaluate(batch, valid_tokens)
        largest[chunk_tokens] = memory.largest
    of_logits = WINDOWS * SEQ_LEN * VOCAB_SIZE * 4
    assert largest[0] >= of_logits and largest[8] <= of_logits // 4


@pytest.mark.usefixtures("group_of_one")
def test_loss_gradients_and_metrics_of_a_model_are_those_of_whole_logits() -> None:
    metrics = {"right": f"{__name__}:right_tokens"}
    found = []
    for chunk_tokens in (0, 7):
        model, (batch, valid_tokens) = _model(chunk_tokens, metrics), _batch()
        measured = model.measure(batch, valid_tokens)
        found.append([measured, model.forward_backward(batch, valid_tokens), *model.gradients()])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-7)
