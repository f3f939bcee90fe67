"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.files import write_atomically, write_output


def test_output_keeps_the_permissions_and_the_link_of_the_file_that_it_replaces(tmp_path: Path) -> None:
    there, link = tmp_path / "there.json", tmp_path / "link.json"
    there.write_text("old")
    there.chmod(0o640)
    link.symlink_to(there)
    write_output(link, b"new")
    assert link.is_symlink() and there.read_bytes() == b"new" and stat.S_IMODE(there.stat().st_mode) == 0o640


def test_new_output_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("x")
    write_output(tmp_path / "output", b"x")
    assert (tmp_path / "output").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_output_to_a_device_goes_there() -> None:
    write_output(Path("/dev/null"), b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)  # noqa: PTH116 - the device itself
    with pytest.raises(OSError, match="No space left on device"):
        write_output(Path("/dev/full"), b"x")


@pytest.mark.parametrize("write", [write_atomically, write_output])
def test_failed_write_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path, write, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_output_into_a_folder_that_is_not_there_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/a\.svg"):
        write_output(tmp_path / "nowhere" / "a.svg", b"x")


KILLED = """
import os, signal, sys
from pathlib import Path
from phalanx.core.files import write_output
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
write_output(Path(sys.argv[1]), b"new" * 100_000)
"""


def test_process_killed_in_the_middle_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL and path.read_text() == "old"
