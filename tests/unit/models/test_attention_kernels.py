"""Every attention kernel against attention written out, forward and backward, for any documents and any part of the
queries."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention

from phalanx.models.kernels import Flex, Packed, Sdpa, Varlen, Window, kernel_named

HEAD_DIM = 8


def _drawn(num_windows: int, length: int, seed: int, heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_windows, count, length, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _written_out(query: Tensor, key: Tensor, value: Tensor, documents: list[list[int]], rows: list[int]) -> Tensor:
    """softmax(q k / sqrt(d)) v in fp64, query by query."""
    query, key, value = (t.double() for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    windows = []
    for window, ids in enumerate(documents):
        heads = []
        for head in range(query.shape[1]):
            seen = []
            for place, row in enumerate(rows):
                keys = [k for k in range(row + 1) if ids[k] == ids[row]]
                scores = key[window, head // group, keys] @ query[window, head, place] / math.sqrt(HEAD_DIM)
                seen.append(scores.softmax(0) @ value[window, head // group, keys])
            heads.append(torch.stack(seen))
        windows.append(torch.stack(heads))
    return torch.stack(windows)


@st.composite
def _windows(draw: st.DrawFn) -> dict[str, Any]:
    """Windows with documents, and either whole or two chunks of them as context parallelism has it."""
    num_windows, chunk = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    cp = draw(st.integers(1, 3))
    length = 2 * cp * chunk
    begins = st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)
    documents = []
    for _ in range(num_windows):
        ids = [0]
        for is_new in draw(begins):
            ids.append(ids[-1] + is_new)
        documents.append(ids)
    spans = None
    if cp > 1:
        rank = draw(st.integers(0, cp - 1))
        spans = tuple(range(i * chunk, (i + 1) * chunk) for i in (rank, 2 * cp - 1 - rank))
    kv_heads = draw(st.sampled_from([1, 2]))
    given_ids = draw(st.booleans())
    return {
        "length": length,
        "documents": documents if given_ids else [[0] * length] * num_windows,
        "given_ids": given_ids,
        "spans": spans,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "kv_heads": kv_heads,
        "seed": draw(st.integers(0, 2**31)),
    }


def _check(name: str, window: dict[str, Any]) -> None:
    length, spans, documents = window["length"], window["spans"], window["documents"]
    query, key, value = _drawn(len(documents), length, window["seed"], window["heads"], window["kv_heads"])
    rows = [place for span in spans or (range(length),) for place in span]
    query = query[:, :, rows].clone()
    tensors = [t.requires_grad_() for t in (query, key, value)]
    kernel = kernel_named(name)
    ids = torch.tensor(documents) if window["given_ids"] else None
    found = kernel(*tensors, kernel.mask(Window(len(documents), length, torch.device("cpu"), ids, spans)))
    expected = _written_out(*tensors, documents, rows)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert found.shape == expected.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((found.double() * weights).sum(), tensors)
    for gradient, theirs in zip(gradients, torch.autograd.grad((expected * weights).sum(), tensors), strict=True):
        torch.testing.assert_close(gradient, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["sdpa", "varlen"])
@settings(deadline=None, max_examples=40)
@given(window=_windows())
def test_kernel_gives_attention_and_gradients_written_out(name: str, window: dict[str, Any]) -> None:
    _check(name, window)


@settings(deadline=None, max_examples=15)
@given(window=_windows())
def test_flex_gives_attention_and_gradients_written_out(window: dict[str, Any]) -> None:
    """Uncompiled, by the arithmetic that torch has for every device; the door that refuses CPUs is held open."""
    with (
        mock.patch.object(flex_attention, "_validate_device"),
        mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        _check("flex", window)


def test_flex_still_has_no_backward_on_cpus() -> None:
    """When this fails torch has mended it: lift the refusal of `attn_backend` in the spec."""
    query, key, value = (t.requires_grad_() for t in _drawn(1, 4, 0, 1, 1))
    kernel = Flex()
    with pytest.raises(NotImplementedError, match="CPU"):
        kernel(query, key, value, kernel.mask(Window(1, 4, torch.device("cpu"), None)))


def test_plain_windows_need_no_mask_and_documents_a_dense_one() -> None:
    cpu = torch.device("cpu")
    assert Sdpa().mask(Window(2, 4, cpu, None)) is None
    mask = Sdpa().mask(Window(1, 4, cpu, torch.tensor([[0, 0, 1, 1]])))
    assert mask is not None and mask.shape == (1, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_varlen_takes_a_document_as_a_sequence_of_its_own() -> None:
    spans = (range(2, 4), range(4, 6))
    mask = Varlen().mask(Window(1, 8, torch.device("cpu"), torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]]), spans))
    assert isinstance(mask, Packed)
    parts = [(s.queries, s.keys) for s in mask.rows[0]]
    assert parts == [
        (range(1), range(3)),
        (range(1, 2), range(3, 4)),
        (range(2, 3), range(3, 5)),
        (range(3, 4), range(5, 6)),
    ]
