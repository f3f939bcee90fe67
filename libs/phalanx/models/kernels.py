"""Attention kernels under one contract: causal, and by documents where a window has them.

sdpa: torch's scaled_dot_product_attention; documents need a dense mask [B, Q, S] of bools. flex: torch's
flex_attention, compiled, which skips blocks of the mask that are empty; it has no backward on CPUs. varlen: every
document as a sequence of its own, by torch's varlen_attn (FlashAttention) on GPUs; on CPUs document by document through
sdpa, exact, and cheaper than a dense mask wherever windows hold several documents.

See docs/decisions/attention-kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Which queries see which keys in a batch of windows: those of their own document that are not later.

    length: S of the whole window, which is where keys lie. document_ids: int64 [B, S], the same within a document and
    rising from one to the next; None: the window is one. spans: parts of the window that the queries are, in their
    order; None: all of it.
    """

    num_windows: int
    length: int
    device: torch.device
    document_ids: Tensor | None
    spans: Sequence[range] | None = None


class Kernel(Protocol):
    """One way to compute attention."""

    def mask(self, window: Window) -> Any:
        """What `__call__` needs to know of a batch of windows; made once, for all layers."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> Tensor:
        """softmax(scale q k) v, [B, H, Q, value_dim], of query [B, H, Q, head_dim], key [B, K, S, head_dim] and value
        [B, K, S, value_dim], where each of the K heads serves H / K heads of the queries. scale: None for
        1 / sqrt(head_dim).
        """


class Sdpa:
    """torch's scaled_dot_product_attention."""

    def mask(self, window: Window) -> Tensor | None:
        """Bool [B or 1, 1, Q, S], true where query (row) may see key (column); None for plain causal windows."""
        if window.document_ids is None and window.spans is None:
            return None
        keys = torch.arange(window.length, device=window.device)
        visible = (_of_queries(keys, window.spans)[:, None] >= keys)[None]
        if (documents := window.document_ids) is not None:
            visible = visible & (_of_queries(documents, window.spans)[:, :, None] == documents[:, None, :])
        return visible[:, None]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
    ) -> Tensor:
        """See `Kernel`."""
        key, value = repeated(query, key, value)
        width = value.shape[-1]
        if query.device.type == "cpu":  # where the fused kernel takes heads of one width alone
            query, key, value = evened(query, key, value)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
        return found[..., :width]


class Flex:
    """torch's flex_attention."""

    def mask(self, window: Window) -> Any:
        """A BlockMask; None on the meta device, where shapes alone count."""
        if window.device.type == "meta":
            return None
        keys = torch.arange(window.length, device=window.device)
        queries = _of_queries(keys, window.spans)
        if window.document_ids is None:
            return self._made(lambda _b, _h, q, k: queries[q] >= k, None, window, len(queries))
        of_keys = window.document_ids
        of_queries = _of_queries(of_keys, window.spans)

        def sees(b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (queries[q] >= k) & (of_queries[b, q] == of_keys[b, k])

        return self._made(sees, window.num_windows, window, len(queries))

    def _made(self, sees: Callable[..., Tensor], num_windows: int | None, window: Window, num_queries: int) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        make: Callable[..., Any] = create_block_mask
        if window.device.type != "cpu":
            make = _compiled(create_block_mask)
        return make(sees, num_windows, None, num_queries, window.length, device=window.device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None = None) -> Tensor:
        """See `Kernel`."""
        if mask is None:
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        from torch.nn.attention.flex_attention import flex_attention

        attend: Callable[..., Any] = flex_attention
        if query.device.type != "cpu":
            attend = _compiled(flex_attention)
        found: Tensor = attend(
            query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return found


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries of one document that lie together, and the keys that the last of them sees; places in their row."""

    queries: range
    keys: range


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Segments by row; on GPUs also as varlen_attn takes them: int32 cumulative lengths [N + 1], the longest ones, and
    the places of keys among B S, where they are not simply all.
    """

    rows: Sequence[Sequence[Segment]]
    ends_of_queries: Tensor | None = None
    ends_of_keys: Tensor | None = None
    most_queries: int = 0
    most_keys: int = 0
    places_of_keys: Tensor | None = None


class Varlen:
    """Every document as a sequence of its own."""

    def mask(self, window: Window) -> Packed:
        """Documents are read on the host: on GPUs once for each micro-batch."""
        starts = _document_starts(window)
        spans = window.spans or (range(window.length),)
        rows = [list(_segments(row, window.length, spans)) for row in starts]
        return Packed(rows) if window.device.type != "cuda" else _packed(rows, window)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float | None = None) -> Tensor:
        """See `Kernel`."""
        width = value.shape[-1]
        query, key, value = evened(query, key, value)
        if mask.ends_of_queries is not None:
            return _flash(query, key, value, mask, scale)[..., :width]
        key, value = repeated(query, key, value)
        rows = zip(mask.rows, *(t.tensor_split(t.shape[0]) for t in (query, key, value)), strict=True)
        found = [torch.cat([_attend(s, q, k, v, scale) for s in row], dim=2) for row, q, k, v in rows]
        return torch.cat(found)[..., :width]


def _attend(segment: Segment, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Of one segment: the last of its queries sees all of its keys."""
    first, last = segment.queries.start, segment.queries.stop
    query, key, value = (
        t[:, :, part.start : part.stop]
        for t, part in ((query, range(first, last)), (key, segment.keys), (value, segment.keys))
    )
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale)


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Packed, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert mask.ends_of_queries is not None and mask.ends_of_keys is not None, "made for a GPU"
    flat_query, flat_key, flat_value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    if mask.places_of_keys is not None:
        flat_key, flat_value = (t.index_select(0, mask.places_of_keys) for t in (flat_key, flat_value))
    found = varlen_attn(
        flat_query,
        flat_key,
        flat_value,
        mask.ends_of_queries,
        mask.ends_of_keys,
        mask.most_queries,
        mask.most_keys,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(found, Tensor), "nothing else was asked for"
    return found.view(query.shape[0], query.shape[2], *query.shape[1:2], query.shape[3]).transpose(1, 2)


def _packed(rows: Sequence[Sequence[Segment]], window: Window) -> Packed:
    segments = [(row * window.length, segment) for row, found in enumerate(rows) for segment in found]
    places = None
    if window.spans is not None:
        places = torch.cat([torch.arange(s.keys.start, s.keys.stop) + start for start, s in segments])
    return Packed(
        rows,
        _ends([len(s.queries) for _, s in segments], window.device),
        _ends([len(s.keys) for _, s in segments], window.device),
        max(len(s.queries) for _, s in segments),
        max(len(s.keys) for _, s in segments),
        None if places is None else places.to(window.device),
    )


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(device)


def _document_starts(window: Window) -> list[list[int]]:
    """By row the places at which a document begins, the first of them 0."""
    if window.document_ids is None:
        return [[0]] * window.num_windows
    begins = window.document_ids.diff(dim=1) != 0
    starts: list[list[int]] = [[0] for _ in range(window.num_windows)]
    for row, place in begins.nonzero().tolist():
        starts[row].append(place + 1)
    return starts


def _segments(starts: Sequence[int], length: int, spans: Sequence[range]) -> Iterator[Segment]:
    place = 0
    for span in spans:
        for start, stop in zip(starts, (*starts[1:], length), strict=True):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                yield Segment(range(place, place + last - first), range(start, last))
                place += last - first


def _of_queries(x: Tensor, spans: Sequence[range] | None) -> Tensor:
    """Of x [..., S] those places that the queries are, [..., Q]."""
    return x if spans is None else torch.cat([x[..., span.start : span.stop] for span in spans], dim=-1)


def evened(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three with heads of one width, the widest, by zeros: scores stay, and so do the value's own elements of what
    attention gives. Whoever widens queries gives `scale`.
    """
    widest = max(query.shape[-1], value.shape[-1])
    query, key, value = (
        t if t.shape[-1] == widest else F.pad(t, (0, widest - t.shape[-1])) for t in (query, key, value)
    )
    return query, key, value


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with a head for each head of the query."""
    if (num_queries_per_key := query.shape[1] // key.shape[1]) == 1:
        return key, value
    return key.repeat_interleave(num_queries_per_key, dim=1), value.repeat_interleave(num_queries_per_key, dim=1)


def kernel_named(name: str) -> Kernel:
    """By the name that `[model] attn_backend` has."""
    return _KERNELS[name]()


_KERNELS: dict[str, Callable[[], Kernel]] = {"sdpa": Sdpa, "flex": Flex, "varlen": Varlen}
