"""Real gloo ranks restore what other layouts saved: bit for bit, reading each byte once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from restore_entries import COLUMNS, ROWS, held_in
from support.meshes import MeshLayout, boxes_of, held_bytes, shapes_of

from phalanx.gang import ForkServer
from phalanx.gang.testing import run_gang
from phalanx.lineage import Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.snapshot import commit
from phalanx.snapshot.writer import Writer

pytestmark = pytest.mark.distributed
DIGEST = "sha256:" + "0" * 64
SAVED = {1: MeshLayout(tp=4), 2: MeshLayout(dp=3, zero=True), 3: MeshLayout(pp=2, dp=2), 4: MeshLayout()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """One attempt with a checkpoint of each layout in `SAVED`."""
    store = open_store(tmp_path_factory.mktemp("saved").as_uri())
    lineage = Lineage(store)
    lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={})
    for step, layout in SAVED.items():
        for rank in range(layout.world_size):
            Writer(store, rank, layout.world_size).save(1, step, held_in(layout, rank, filled=True)).wait(60)
        draft = Manifest(1, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step), {}, (), ())
        commit(lineage, store, draft, layout.world_size, 30)
    yield store


def test_restore_of_any_layout_reads_what_its_boxes_hold_and_is_bit_equal(
    saved: ObjectStore, fork_server: ForkServer
) -> None:
    """Case 13: dp, tp, pp, zero and world size change, moments included."""
    after = [
        (1, MeshLayout(dp=4, zero=True)),
        (2, MeshLayout(tp=4)),
        (3, MeshLayout(pp=2, tp=2)),
        (4, MeshLayout(dp=4)),
        (2, MeshLayout(pp=4)),
        (1, MeshLayout(dp=2, tp=2, zero=True)),
    ]
    layouts = [[step, [layout.pp, layout.dp, layout.tp, layout.zero]] for step, layout in after]
    arguments = {"url": saved.url, "layouts": layouts, "group_size": 128}
    ranks = run_gang(fork_server, 4, "restore_entries:restore_together", arguments, 240.0)
    shapes = shapes_of(ROWS, COLUMNS)
    for number, (step, layout) in enumerate(after):
        reports = [rank["reports"][number] for rank in ranks]
        read = sum(report["read"] for report in reports)
        held = held_bytes(shapes, boxes_of(shapes, layout), 4)
        print(f"{SAVED[step]} -> {layout}: read {read / held:.3f} of {held:,} bytes held")  # noqa: T201
        assert all(report["right"] for report in reports), layout
        assert read <= 1.05 * held
        if layout == MeshLayout(dp=4):
            assert max(report["read"] for report in reports) < 0.5 * held, "replicas share the reading"


def test_restore_with_a_rank_that_is_gone_ends_by_name_within_the_deadline(
    saved: ObjectStore, fork_server: ForkServer
) -> None:
    ranks = run_gang(fork_server, 3, "restore_entries:lose_a_reader", {"url": saved.url}, 60.0)
    assert all("gone or late" in rank["told"] for rank in (ranks[0], ranks[2]))
