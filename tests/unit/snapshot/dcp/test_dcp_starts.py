"""Starts of a foreign program are attempts: from where each goes on, which steps it may save, and who is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import start_again, url_of

from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot.dcp import PhalanxWriter, load, save
from phalanx.snapshot.dcp.session import Session

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(value: int = 0) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), float(value))}


def live(url: str) -> list[tuple[int, int]]:
    return [(ref.attempt, ref.step) for ref in Lineage(open_store(url)).checkpoints()]


def test_each_start_that_saves_is_one_attempt_from_the_newest(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    for step in (1, 2):
        save(state(), url, step=step)
    start_again()
    assert load(state(), url) == CheckpointRef(1, 2)
    for step in (3, 4):
        save(state(), url, step=step)
    assert live(url) == [(1, 1), (1, 2), (2, 3), (2, 4)]
    newest = Lineage(open_store(url)).newest_attempt()
    assert newest is not None and newest.parent == CheckpointRef(1, 2)
    assert newest.placement["writer"] == "torch.distributed.checkpoint" and newest.placement["world_size"] == 1


def test_start_that_forgets_to_load_cannot_save_over_the_history(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    save(state(), url, step=5)
    start_again()
    with pytest.raises(PhalanxError, match="a step after 5, the newest there, which was not loaded"):
        save(state(), url, step=5)
    assert len(Lineage(open_store(url)).attempts()) == 1
    assert save(state(), url, step=6) == CheckpointRef(2, 6)


def test_start_from_an_older_step_goes_on_from_there(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    for step in (1, 2, 3):
        save(state(step), url, step=step)
    start_again()
    found = state()
    load(found, url, 1)
    assert torch.equal(found["x"], state(1)["x"])
    with pytest.raises(PhalanxError, match="a step after 1, from which this program began"):
        save(state(), url, step=1)
    save(state(), url, step=3)
    assert live(url) == [(1, 1), (2, 3)]


def test_program_that_goes_back_goes_on_in_a_new_attempt(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    for step in (1, 2, 3):
        save(state(step), url, step=step)
    with pytest.raises(PhalanxError, match="a step after 3, that this program has saved"):
        save(state(), url, step=2)
    load(state(), url, 1)
    save(state(), url, step=2)
    save(state(), url, step=3)
    assert live(url) == [(1, 1), (2, 2), (2, 3)]


def test_load_in_between_changes_nothing_where_steps_go_on(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    save(state(), url, step=1)
    save(state(), url, step=2)
    load(state(), url, 1)
    save(state(), url, step=3)
    assert live(url) == [(1, 1), (1, 2), (1, 3)]


def test_program_that_was_superseded_is_told_and_adds_nothing(tmp_path: Path) -> None:
    """Case 14."""
    url = url_of(tmp_path)
    zombie, placement = Session(open_store(url)), {"world_size": 1}
    assert zombie.begin(1, placement).number == 1
    assert save(state(), url, step=1) == CheckpointRef(2, 1)
    with pytest.raises(PhalanxError, match=r"attempt 1 at .* 2 has been opened since by another program"):
        zombie.begin(2, placement)
    assert live(url) == [(2, 1)]


def test_checkpoint_that_fell_out_of_the_history_is_no_beginning(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    for step in (1, 2):
        save(state(), url, step=step)
    late = Session(open_store(url))
    late.loaded(CheckpointRef(1, 2))
    start_again()
    load(state(), url, 1)
    save(state(), url, step=2)
    with pytest.raises(PhalanxError, match=r"attempt 1 step 2 .* expected a live one"):
        late.begin(3, {})


def test_opener_that_another_program_overtakes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(tmp_path)
    save(state(), url, step=1)
    late, other = Session(open_store(url)), Lineage(open_store(url))
    real = Lineage.open_attempt

    def overtaken(self: Lineage, **options: object) -> Attempt:
        monkeypatch.setattr(Lineage, "open_attempt", real)
        save(state(), url, step=2)
        return real(self, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Lineage, "open_attempt", overtaken)
    with pytest.raises(PhalanxError, match="another program saves there at this moment"):
        late.begin(9, {})
    assert other.checkpoints() == (CheckpointRef(1, 1), CheckpointRef(1, 2))


def test_job_of_phalanx_run_is_no_place_for_a_foreign_program(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    Lineage(open_store(url)).create_job(request_id="r", spec={}, identity={}, identity_digest=sha256(b""))
    with pytest.raises(PhalanxError, match="a job of `phalanx run`"):
        save(state(), url, step=1)


def test_step_whose_save_failed_in_the_writing_is_saved_by_a_new_attempt(tmp_path: Path) -> None:
    url, ones = url_of(tmp_path), torch.ones(3)
    save({"x": ones}, url, step=1)
    with pytest.raises(dcp.CheckpointException):
        dcp.save({"x": ones, "bad": object()}, storage_writer=PhalanxWriter(url, 5))
    assert save({"x": ones}, url, step=5) == CheckpointRef(2, 5)
