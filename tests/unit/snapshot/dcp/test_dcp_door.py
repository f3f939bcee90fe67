"""A foreign program in one process saves and loads through the door."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import blank, flip, same, some_state, start_again, url_of
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.core.errors import OutsideError, PhalanxError, Problems
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
from phalanx.snapshot import DamagedCheckpoint
from phalanx.snapshot.dcp import PhalanxReader, PhalanxWriter, latest_step, load, save
from phalanx.snapshot.load import load as load_arrays

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def checkpoints(url: str) -> list[tuple[int, int]]:
    return [(ref.attempt, ref.step) for ref in Lineage(open_store(url)).checkpoints()]


def test_door_saves_and_loads_a_nested_state_bit_for_bit(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    assert latest_step(url) is None
    assert save(state, url, step=3) == CheckpointRef(1, 3)
    found = blank(state)
    assert load(found, url) == CheckpointRef(1, 3)
    assert same(found, state)
    assert latest_step(url) == 3


def test_door_writes_safetensors_and_json_alone(tmp_path: Path) -> None:
    """Case 6: no byte of what is stored is a pickle."""
    save(some_state(), url_of(tmp_path), step=3)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            table = json.loads(data[8 : 8 + size])
            del table["__metadata__"]
            assert max(entry["data_offsets"][1] for entry in table.values()) == len(data) - 8 - size
        else:
            json.loads(data)


def test_door_checkpoint_is_one_for_the_commands_and_for_notebooks(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=3)
    for command in (["ls"], ["show"], ["verify"]):
        done = CliRunner().invoke(app, ["checkpoint", *command, url])
        assert done.exit_code == 0, done.output
    arrays = load_arrays(url)
    assert (arrays["optim.state.w.exp_avg"] == state["optim"]["state"]["w"]["exp_avg"].numpy()).all()


def test_door_checkpoint_has_no_names_to_export_it_by(tmp_path: Path) -> None:
    url, out = url_of(tmp_path / "job"), tmp_path / "out"
    save(some_state(), url, step=3)
    done = CliRunner().invoke(app, ["checkpoint", "export", url, "3", "--out", str(out)])
    assert isinstance(done.exception, PhalanxError) and done.exit_code != 0
    assert "another program saved these checkpoints; read them with phalanx.snapshot.load" in str(done.exception)
    assert not out.exists()


def test_door_serves_modules_and_optimizers(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"model": model, "optim": optimizer}, url, step=1)
    other = torch.nn.Linear(3, 2)
    optimizer_2 = torch.optim.AdamW(other.parameters(), lr=7.0)
    other(torch.zeros(1, 3)).sum().backward()
    optimizer_2.step()
    load({"model": other, "optim": optimizer_2}, url)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(optimizer_2.state_dict(), optimizer.state_dict())


def test_door_load_into_a_fresh_optimizer_names_the_state_it_would_lose(tmp_path: Path) -> None:
    """Case 5: an optimizer never starts from scratch silently."""
    url = url_of(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save({"model": model, "optim": optimizer}, url, step=1)
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    with pytest.raises(Problems) as caught:
        load({"optim": fresh}, url)
    assert "optim.state.0.exp_avg" in [problem.where for problem in caught.value.problems]


def test_door_load_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    """Cases 5 and 12: an ordinary error, which `except Exception` sees."""
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=3)
    found = blank(state)
    found["model"]["new"], found["model"]["other"] = torch.zeros(2), 5
    found["model"]["float32"] = torch.zeros(6, 4)
    found["model"]["int64"] = torch.zeros(6, 5)
    found["step"] = torch.zeros(())
    try:
        load(found, url)
    except Exception as error:  # noqa: BLE001  (what this test is about)
        assert isinstance(error, Problems)
        names = {problem.where for problem in error.problems}
        assert isinstance(error.__cause__, dcp.CheckpointException)
    assert names == {"model.new", "model.other", "model.float32", "model.int64", "step"}


def test_door_partial_load_leaves_out_only_what_is_named(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=3)
    found = blank(state)
    del found["model"]["uint8"]
    found["model"]["new"] = torch.full((2,), 9.0)
    load(found, url, partial=["model.new", "model.uint8"])
    assert torch.equal(found["model"].pop("new"), torch.full((2,), 9.0))
    del state["model"]["uint8"]
    assert same(found, state)
    with pytest.raises(Problems, match=r"partial model\.typo"):
        load(found, url, partial=["model.typo", "model.uint8"])


def test_door_load_of_one_key_reads_that_alone(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=3)
    found = {"optim": blank(state["optim"])}
    load(found, url)
    assert same(found["optim"], state["optim"])


def test_door_load_where_there_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=f"at {url_of(tmp_path)}: expected a job with a committed checkpoint"):
        load(some_state(), url_of(tmp_path))


def test_torch_calls_with_writer_and_reader_save_and_load(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state()
    writer = PhalanxWriter(url)
    for step in ("1", "2"):
        dcp.save(state, storage_writer=writer, checkpoint_id=step)
    assert checkpoints(url) == [(1, 1), (1, 2)]
    found = blank(state)
    dcp.load(found, storage_reader=PhalanxReader(url), checkpoint_id="1")
    assert same(found, state)


def test_torch_load_of_a_flipped_bit_says_where_it_is(tmp_path: Path) -> None:
    """Cases 7 and 12: torch's exception is of its own kind, and holds ours."""
    url, state = url_of(tmp_path), some_state()
    dcp.save(state, storage_writer=PhalanxWriter(url, 1))
    (path,) = tmp_path.rglob("*.safetensors")
    flip(path, path.stat().st_size - 1)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(blank(state), storage_reader=PhalanxReader(url))
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, DamagedCheckpoint)
    assert error.tensor is not None and error.tensor in str(caught.value) and str(error.key) in str(caught.value)


@pytest.mark.parametrize("what", ["*.safetensors", "*-values.json", "parts/*.json", "manifest.json"])
def test_door_load_of_a_damaged_checkpoint_names_the_object_and_the_older_step_loads(tmp_path: Path, what: str) -> None:
    """Case 7: refused, the object named, the previous checkpoint used; the next attempt begins there."""
    url, state = url_of(tmp_path), some_state()
    save(state, url, step=1)
    save(state, url, step=2)
    (path,) = (tmp_path / "a00000001/s00000002").rglob(what)
    flip(path, path.stat().st_size - 5)
    start_again()
    found = blank(state)
    with pytest.raises(OutsideError, match=path.relative_to(tmp_path).as_posix()) as caught:
        load(found, url)
    assert isinstance(caught.value, DamagedCheckpoint) or what == "manifest.json"
    if isinstance(caught.value, DamagedCheckpoint):
        assert any("step 1" in note for note in caught.value.__notes__)
    load(found, url, 1)
    assert same(found, state)
    assert save(found, url, step=2) == CheckpointRef(2, 2)
    assert checkpoints(url) == [(1, 1), (2, 2)]


def test_save_of_what_json_lacks_names_it_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    url, state = url_of(tmp_path), some_state() | {"generator": object(), "rng": b"\x00"}
    with pytest.raises(Problems) as caught:
        save(state, url, step=1)
    assert [problem.where for problem in caught.value.problems] == ["generator", "rng"]
    assert checkpoints(url) == [] and not list(tmp_path.rglob("*.safetensors"))


def test_save_of_a_type_that_the_format_lacks_names_the_tensor(tmp_path: Path) -> None:
    with pytest.raises(Problems, match=r"model\.phase is 'complex64'"):
        save({"model": {"phase": torch.zeros(2, dtype=torch.complex64)}}, url_of(tmp_path), step=1)
    assert not list(tmp_path.iterdir())


def test_save_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="use_collectives"):
        dcp.save(some_state(), storage_writer=PhalanxWriter(url_of(tmp_path), 1), use_collectives=False)
