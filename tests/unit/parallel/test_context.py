"""How a window is shared: every token once, the same work for each rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.attention import check_heads
from phalanx.models.decoder import Decoder
from phalanx.parallel.context import ContextShare, spans_of


@given(st.integers(1, 8), st.integers(1, 16))
def test_each_token_is_one_ranks_and_each_rank_sees_as_many_pairs(cp: int, chunk: int) -> None:
    length = 2 * cp * chunk
    shares = [[place for span in spans_of(length, cp, rank) for place in span] for rank in range(cp)]
    assert sorted(place for share in shares for place in share) == list(range(length))
    assert all(share == sorted(share) for share in shares)
    assert len({sum(place + 1 for place in share) for share in shares}) == 1, "queries times the keys that they see"


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 4, 4), (8, 2, 4), (8, 1, 8), (6, 6, 3)])
def test_heads_that_can_be_dealt_out_are_accepted(heads: int, kv_heads: int, ranks: int) -> None:
    check_heads(heads, kv_heads, ranks)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 4, 3), (12, 6, 4), (2, 1, 4)])
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, kv_heads: int, ranks: int) -> None:
    with pytest.raises(PhalanxError, match=r"^\[parallel\] cp is .*all_gather"):
        check_heads(heads, kv_heads, ranks)


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("attn_backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("method", ["all_gather", "a2a"])
def test_traced_blocks_in_a_context_of_one_rank_give_what_they_give_without(
    group_of_one: dist.ProcessGroup, method: str, attn_backend: str
) -> None:
    """Traced as torch.compile does, without its code generation: exchanges break the graph, nothing else does harm."""
    args = DecoderArgs(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn_dim=16, vocab_size=20)
    torch.manual_seed(0)
    plain, shared = Decoder(args), Decoder(args, attn_backend)
    shared.load_state_dict(plain.state_dict())
    shared.set_context(ContextShare(group_of_one, 8, method))
    for layer in shared.layers.values():
        layer.forward = torch.compile(layer.forward, backend="eager")
    tokens = torch.arange(16).view(2, 8)
    positions = torch.arange(8).expand(2, -1)
    for starts in ((3, 5), (1, 8)):
        documents = torch.stack([(positions[0] >= start).long() for start in starts])
        expected, found = (model(tokens, positions, documents) for model in (plain, shared))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        gradients = [
            torch.autograd.grad(logits.square().sum(), list(model.parameters()))
            for logits, model in ((expected, plain), (found, shared))
        ]
        for theirs, ours in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
