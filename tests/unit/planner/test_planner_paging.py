"""Optimizer state on local disks, as the planner counts it."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.planner import rank_memory
from phalanx.planner.job_search import model_shape, run_shape
from phalanx.planner.paging import amount, paging_of
from phalanx.planner.parameters import count_parameters
from phalanx.spec import Job, Layout, parse_job
from phalanx.trainer import offload

PAGE = 32 << 20  # however much memory there is for pages


def job_of(folder: str = "/local/pages", nproc: int = 8, **keys: object) -> Job:
    """An 8-billion-class decoder with its state on disks."""
    paged = {"offload": "nvme", "offload_folder": folder, "offload_gib": 4.0}
    return parse_job(
        {
            "job": {"name": "paging", "storage": "memory://paging"},
            "model": {"preset": "llama3-8b"},
            "data": {"train": "memory://paging/train"},
            "training": {"seq_len": 4096, "steps": 1, "global_batch_size": 8},
            "optimizer": {"lr": 0.1, **paged, **keys},
            "cluster": {"device": "cuda", "gpu": "H100-80", "nproc": nproc},
        }
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=8), Layout(pp=2, dp_shard=4), Layout(tp=2, dp_shard=4)])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_state_on_a_disk_takes_a_few_pages_of_memory_and_the_checkpoint_stays_as_large(
    layout: Layout, cpu_offload: bool
) -> None:
    job = job_of()
    model, run = model_shape(job), dataclasses.replace(run_shape(job), cpu_offload=cpu_offload)
    kept = rank_memory(model, layout, dataclasses.replace(run, paging_bytes=0))
    for before, after in zip(kept, rank_memory(model, layout, run), strict=True):
        assert run.paging_bytes == PAGE == after.optimizer_bytes, "a GPU holds one page"
        assert after.paged_bytes == before.optimizer_bytes and after.disk_bytes == 2 * before.optimizer_bytes
        assert after.state_bytes == before.state_bytes and before.disk_bytes == 0
        saved = before.optimizer_bytes - PAGE
        if cpu_offload:
            assert before.host_bytes - after.host_bytes == saved and after.total_bytes == before.total_bytes
        else:
            assert before.total_bytes - after.total_bytes == saved


def test_a_node_holds_two_places_for_two_moments_of_all_its_parameters() -> None:
    job = job_of()
    total = count_parameters(model_shape(job)).total
    for layout in (Layout(dp_shard=8), Layout(pp=2, dp_shard=4), Layout(dp_replicate=2, dp_shard=4)):
        found = paging_of(job, layout)
        assert found is not None and found.memory_bytes == 8 * PAGE
        assert found.node_bytes == pytest.approx(16 * total * layout.dp_replicate, rel=0.01)
        assert found.rank_bytes * 8 >= found.node_bytes
    spread = paging_of(job, Layout(dp_shard=16))
    assert spread is not None and spread.node_bytes == pytest.approx(8 * total, rel=0.01)
    assert amount(found.rank_bytes) in found.said and "/local/pages" in found.said
    assert "256.0 MiB of memory" in found.said


@pytest.mark.parametrize(("gib", "page"), [(8 / 1024, 1 << 20), (0.25, PAGE), (0.3, PAGE)])
def test_page_is_an_eighth_of_the_memory_up_to_the_most_that_is_of_use(gib: float, page: int) -> None:
    assert run_shape(job_of(offload_gib=gib)).paging_bytes == page
    found = paging_of(job_of(offload_gib=gib), Layout())
    assert found is not None and found.memory_bytes == 8 * page


def test_model_of_the_users_is_counted_by_its_parameters() -> None:
    found = paging_of(job_of(nproc=2), Layout(dp_shard=2), num_parameters=1001)
    assert found is not None and (found.rank_bytes, found.node_bytes) == (16 * 501, 2 * 16 * 501)
    assert paging_of(job_of(offload="none"), Layout()) is None


def test_disk_with_too_little_space_or_no_folder_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, layout = job_of(str(tmp_path / "new" / "pages")), Layout(dp_shard=8)
    needed = paging_of(job, layout)
    assert needed is not None
    usage = namedtuple("usage", "total used free")
    for free, is_enough in ((needed.node_bytes, True), (needed.node_bytes - 1, False)):
        monkeypatch.setattr(offload.shutil, "disk_usage", lambda _, free=free: usage(2 * free, free, free))
        if is_enough:
            assert offload.check_offload(job, layout) == needed.said
            continue
        with pytest.raises(PhalanxError, match=r"optimizer\.offload_folder is .*GiB free for the optimizer state"):
            offload.check_offload(job, layout)
    assert not (tmp_path / "new").exists(), "nothing is made by a check"
    (tmp_path / "file").write_text("")
    with pytest.raises(PhalanxError, match="a folder that can be written"):
        offload.check_offload(job_of(str(tmp_path / "file")), layout)
    assert offload.check_offload(job_of(offload="none"), layout) == ""
