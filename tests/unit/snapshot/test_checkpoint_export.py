"""Export killed, resumed, raced and measured: the target is whole or absent, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_job import file_store, open_attempt, random_tensor, rows_of, same_bits, save, whole_of

from phalanx.checkpoint.export import Target, export
from phalanx.checkpoint.export_folder import PartFolder
from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, Manifest
from phalanx.objects import ObjectStore, StoreError
from phalanx.objects.faults import FaultyStore, fail_before, number_is

PLAIN = Target({"model_type": "plain"}, lambda name: name, {"tokenizer.json": b"{}"})
FILE_BYTES = 20_000

CHILD = """
import os, signal, sys
from pathlib import Path
from phalanx.checkpoint.export import Target, export
from phalanx.lineage import CheckpointRef, Lineage
from phalanx.objects import open_store
store, out, dtype, kill_at = open_store(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
done = 0
def advance(num_bytes):
    global done
    done += 1
    if done == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
def rss(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))
manifest = Lineage(store).manifest(CheckpointRef(1, 5))
before = rss("VmRSS")
target = Target({}, lambda name: name, {})
report = export(store, manifest, out, target, dtype=dtype, file_bytes=int(sys.argv[5]), progress=advance)
print(rss("VmHWM") - before, len(report.kept))
"""


def run_child(url: str, out: Path, dtype: str, kill_at: int, file_bytes: int) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", CHILD, url, str(out), dtype, str(kill_at), str(file_bytes)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False)


def some_weights(count: int = 12) -> dict[str, torch.Tensor]:
    return {f"model.w{n:02d}": random_tensor((50, 20 + n), torch.float32, n) for n in range(count)}


def saved(store: ObjectStore, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    return save(store, open_attempt(store), 5, rows_of(tensors, 3))


def columns_of(name: str, tensor: torch.Tensor, world_size: int) -> list[list[HeldTensor]]:
    rows, columns = tensor.shape
    share = columns // world_size
    return [
        [HeldTensor(name, (rows, columns), Box((0, r * share), (rows, share)), tensor[:, r * share : (r + 1) * share])]
        for r in range(world_size)
    ]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_equals(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    found = exported(folder)
    assert found.keys() == {name.removeprefix("model.") for name in tensors}
    assert all(same_bits(found[name.removeprefix("model.")], tensor) for name, tensor in tensors.items())


def test_export_failing_at_any_read_goes_on_with_whole_files(tmp_path: Path) -> None:
    """Case 8: storage fails at operation k, for every k; no target is there, and the next start does only the rest."""
    tensors = some_weights(6)
    store = file_store(tmp_path / "job")
    manifest = saved(store, tensors)
    counting = FaultyStore(store)
    files = export(counting, manifest, tmp_path / "all", PLAIN, file_bytes=6_000).files
    kept: list[int] = []
    for number in range(len(counting.calls)):
        out = tmp_path / f"hf{number}"
        faulty = FaultyStore(store, [fail_before(number_is(number), StoreError("no reply"))])
        with pytest.raises(StoreError):
            export(faulty, manifest, out, PLAIN, file_bytes=6_000)
        assert not out.exists()
        report = export(store, manifest, out, PLAIN, file_bytes=6_000)
        assert sorted(path.name for path in out.iterdir()) == sorted(report.files) == sorted(files)
        assert_equals(out, tensors)
        kept.append(len(report.kept))
    assert kept == sorted(kept) and kept[-1] == 5 and not list(tmp_path.glob(".*"))


def test_export_killed_by_sigkill_is_absent_and_then_whole(tmp_path: Path) -> None:
    """Case 1, 8."""
    tensors = some_weights()
    store = file_store(tmp_path / "job")
    saved(store, tensors)
    out = tmp_path / "hf"
    for kill_at in (1, 6):
        done = run_child(store.url, out, "float32", kill_at, FILE_BYTES)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not out.exists()
    done = run_child(store.url, out, "float32", 0, FILE_BYTES)
    assert done.returncode == 0 and int(done.stdout.split()[1]) >= 1, done
    assert_equals(out, tensors)


def test_export_needs_less_than_twice_the_largest_tensor(tmp_path: Path) -> None:
    """A real process; the largest tensor lies in three boxes of its columns, and has to be put together."""
    large = torch.randn((1 << 13, 3 << 10), generator=torch.Generator().manual_seed(1))
    layout = columns_of("model.large", large, 3)
    layout[0] += whole_of({"model.small": random_tensor((1000,), torch.float32, 2)})
    store = file_store(tmp_path / "job")
    save(store, open_attempt(store), 5, layout)
    done = run_child(store.url, tmp_path / "hf", "bfloat16", 0, 1 << 40)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[0])
    assert peak < 2 * large.nbytes, f"peak memory is {peak / large.nbytes:.2f} of the largest tensor"
    assert same_bits(exported(tmp_path / "hf")["large"], large.bfloat16())


@pytest.mark.parametrize("spoil", ["bit", "short", "gone", "state", "line"])
def test_export_does_not_go_on_from_what_was_spoiled(tmp_path: Path, spoil: str) -> None:
    """Case 7: what lies in the part folder is believed only after its bytes were read again."""
    tensors = some_weights()
    store = file_store(tmp_path / "job")
    manifest = saved(store, tensors)
    out = tmp_path / "hf"
    assert run_child(store.url, out, "float32", 9, FILE_BYTES).returncode == -signal.SIGKILL
    part = tmp_path / ".hf.part"
    first = sorted((part / "files").iterdir())[0]
    if spoil == "bit":
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    elif spoil == "short":
        os.truncate(first, first.stat().st_size - 1)
    elif spoil == "gone":
        first.unlink()
    elif spoil == "state":
        (part / "state").write_bytes(b"\xff not json\n")
    else:
        with (part / "state").open("ab") as file:
            file.write(b'{"file":"model-0000')
    report = export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES)
    assert (first.name in report.kept) == (spoil == "line")
    assert_equals(out, tensors)


def test_export_of_another_checkpoint_or_type_begins_anew(tmp_path: Path) -> None:
    store = file_store(tmp_path / "job")
    attempt = open_attempt(store)
    older, newer = some_weights(), {name: value * 2 for name, value in some_weights().items()}
    save(store, attempt, 5, rows_of(older, 2))
    manifest = save(store, attempt, 10, rows_of(newer, 2))
    out = tmp_path / "hf"
    assert run_child(store.url, out, "float32", 9, FILE_BYTES).returncode == -signal.SIGKILL
    assert export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES).kept == ()
    assert_equals(out, newer)
    out = tmp_path / "hf2"
    assert run_child(store.url, out, "bfloat16", 9, FILE_BYTES).returncode == -signal.SIGKILL
    first = Lineage(store).manifest(CheckpointRef(1, 5))
    assert export(store, first, out, PLAIN, file_bytes=FILE_BYTES).kept == ()
    assert_equals(out, older)


def test_export_that_another_process_makes_is_refused(tmp_path: Path) -> None:
    store = file_store(tmp_path / "job")
    manifest = saved(store, some_weights())
    out = tmp_path / "hf"
    other = PartFolder(out, {"attempt": 1})
    with pytest.raises(PhalanxError, match="no other export"):
        export(store, manifest, out, PLAIN)
    other.close()
    export(store, manifest, out, PLAIN)


def test_export_killed_after_its_last_act_but_one_leaves_the_target_and_is_tidied(tmp_path: Path) -> None:
    store = file_store(tmp_path / "job")
    manifest = saved(store, some_weights())
    out = tmp_path / "hf"
    export(store, manifest, out, PLAIN)
    (tmp_path / ".hf.part").mkdir()
    (tmp_path / ".hf.part/state").write_bytes(b"")
    with pytest.raises(PhalanxError, match="does not exist yet"):
        export(store, manifest, out, PLAIN)
    assert not (tmp_path / ".hf.part").exists() and (out / "config.json").exists()


def killed_before_tidying(store: ObjectStore, manifest: Manifest, out: Path) -> None:
    """An export whose process ended once its folder had its name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PartFolder, "discard", lambda self: None)
        export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES)
    assert [path.name for path in out.with_name(".hf.part").iterdir()] == ["state"]


def test_export_killed_after_the_rename_is_done_when_it_is_started_again(tmp_path: Path) -> None:
    """Case 1: the second start reads what is there, says that all of it was, and tidies."""
    tensors, out, told = some_weights(), tmp_path / "hf", 0
    store = file_store(tmp_path / "job")
    manifest = saved(store, tensors)
    killed_before_tidying(store, manifest, out)

    def hear(num_bytes: int) -> None:
        nonlocal told
        told += num_bytes

    report = export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES, progress=hear)
    assert sorted(report.kept) == sorted(path.name for path in out.glob("*.safetensors"))
    assert told == report.num_bytes and not out.with_name(".hf.part").exists()
    assert_equals(out, tensors)
    with pytest.raises(PhalanxError, match="does not exist yet"):
        export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES)


@pytest.mark.parametrize("spoil", ["bit", "gone", "small", "type"])
def test_export_does_not_take_another_folder_for_what_it_renamed(tmp_path: Path, spoil: str) -> None:
    out, store = tmp_path / "hf", file_store(tmp_path / "job")
    manifest = saved(store, some_weights())
    killed_before_tidying(store, manifest, out)
    first = min(out.glob("*.safetensors"))
    if spoil == "bit":
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    elif spoil == "gone":
        first.unlink()
    elif spoil == "small":
        (out / "config.json").write_text("{}")
    with pytest.raises(PhalanxError, match="does not exist yet"):
        export(store, manifest, out, PLAIN, file_bytes=FILE_BYTES, dtype="bfloat16" if spoil == "type" else "float32")
    assert out.exists()


def test_export_from_s3_equals_export_from_files(tmp_path: Path, s3_prefix: str) -> None:
    from phalanx.objects import open_store

    tensors = some_weights()
    store = open_store(s3_prefix)
    manifest = saved(store, tensors)
    export(store, manifest, tmp_path / "hf", PLAIN, file_bytes=FILE_BYTES)
    assert_equals(tmp_path / "hf", tensors)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {index["weight_map"][name] for name in exported(tmp_path / "hf")} == {
        path.name for path in (tmp_path / "hf").glob("*.safetensors")
    }
