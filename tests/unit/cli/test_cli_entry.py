"""How the `phalanx` command ends where no command of it is at fault: Ctrl-C while it still imports itself is one line
and 130, wherever it falls; a working folder that was removed is one line and 2.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Interrupts itself where `{module}` is imported; what imports it swallows every exception.
PROGRAM = """
import os, signal, sys
from importlib.abc import MetaPathFinder

signal.signal(signal.SIGINT, signal.{before})

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass
            except BaseException:
                pass
        return None

sys.meta_path.insert(0, Interrupting())
sys.argv = ["phalanx", "--help"]
from phalanx.cli.entry import main
main()
"""


def _run(module: str, before: str = "default_int_handler") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(module=module, before=before)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["phalanx.cli.main", "typer", "phalanx.cli.doctor", "phalanx.cli.standard_output"])
def test_interrupt_during_an_import_is_one_line_and_130(module: str) -> None:
    done = _run(module)
    assert (done.returncode, done.stderr, done.stdout) == (130, "phalanx: interrupted\n", "")


def test_command_that_was_started_to_ignore_interrupts_ignores_them() -> None:
    done = _run("phalanx.cli.main", before="SIG_IGN")
    assert done.returncode == 0 and "Usage" in done.stdout and done.stderr == ""


@pytest.mark.parametrize("arguments", [["data", "ls", "file://./corpus"], ["plan", "job.toml"], ["--version"]])
def test_working_folder_that_was_removed_is_one_line_where_it_is_needed(tmp_path: Path, arguments: list[str]) -> None:
    program = f"import os, sys; os.rmdir(os.getcwd()); sys.argv = {['phalanx', *arguments]!r}\n"
    program += "from phalanx.cli.entry import main; main()"
    folder = tmp_path / "removed"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert not folder.exists()
    if arguments == ["--version"]:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("phalanx: ")
        assert "working folder" in done.stderr or "no such file" in done.stderr
