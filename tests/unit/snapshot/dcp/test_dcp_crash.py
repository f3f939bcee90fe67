"""A save through the door that breaks at any operation leaves the checkpoint before it, or the new one whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dcp_kit import start_again, url_of

from phalanx.core.errors import OutsideError
from phalanx.lineage import Lineage
from phalanx.objects import open_store
from phalanx.objects.faults import Fault, FaultyStore, fail_after, fail_before, number_is
from phalanx.snapshot.dcp import latest_step, load, save, session
from phalanx.snapshot.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(step: int) -> dict[str, object]:
    return {"x": torch.full((3,), float(step)), "step": step}


@pytest.mark.parametrize("fault", [fail_before, fail_after])
def test_save_that_breaks_at_any_operation_leaves_the_old_or_the_whole_new_one(
    tmp_path: Path, fault: Callable[..., Fault]
) -> None:
    """Case 1: for each operation k of a save; the next start goes on from what is there."""
    url = url_of(tmp_path)
    store = open_store(url)
    save(state(1), url, step=1)
    before = 1
    for number in itertools.count():
        start_again()
        broken = FaultyStore(store, [fault(number_is(number), OSError("cut off"))])
        session._sessions[os.getpid(), store.url, None] = session.Session(broken)
        failed = False
        try:
            save(state(number + 2), url, step=number + 2)
        except OutsideError:
            failed = True
        start_again()
        after = latest_step(url)
        assert after in ({before, number + 2} if failed else {number + 2})
        found = state(0)
        ref = load(found, url)
        assert torch.equal(torch.as_tensor(found["x"]), torch.full((3,), float(ref.step))) and found["step"] == ref.step
        assert verify(store, Lineage(store).manifest(ref)) == ()
        before = ref.step
        if not failed and number > 5:
            break
    assert number > 10, "operations of a save"
