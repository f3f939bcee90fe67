"""Facts from rank 0 over a key-value store of the real kind: threads share torch's in-memory store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistStoreError, HashStore

from phalanx.trainer.exchange import Exchange


def never() -> dict[str, int]:
    """Ranks other than 0 must not be asked."""
    raise AssertionError("asked on another rank than 0")


def test_share_gives_every_rank_what_rank_0_made_in_order() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(lambda rank=rank: _ask_twice(Exchange(store, rank), never, never)) for rank in (1, 2)]
        own = pool.submit(lambda: _ask_twice(Exchange(store, 0), lambda: {"a": [1, None]}, lambda: {"b": "x"}))
        answers = [future.result(timeout=20) for future in [own, *others]]
    assert answers == [({"a": [1, None]}, {"b": "x"})] * 3


def _ask_twice(exchange: Exchange, first, second):  # type: ignore[no-untyped-def]
    return exchange.share(first, 10.0), exchange.share(second, 10.0)


def test_share_without_rank_0_ends_at_its_deadline() -> None:
    with pytest.raises((DistStoreError, RuntimeError), match=r"[Tt]ime(d |)out"):
        Exchange(HashStore(), 1).share(never, 0.2)


def test_share_of_a_failure_raises_on_rank_0_and_answers_nobody() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="no plan"):
        Exchange(store, 0).share(_fail, 1.0)
    assert not store.check(["exchange/1"])


def _fail() -> dict[str, int]:
    raise ValueError("no plan")
