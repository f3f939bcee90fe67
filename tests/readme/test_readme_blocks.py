"""README.md is executed: every shell block carries `run` or `skip: reason`; the run blocks go, in order, through one
shell in one folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.home.detached import end
from phalanx.home.layout import Home

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = {"bash", "sh", "console", "shell"}


def shell_blocks() -> list[tuple[str, str]]:
    """(mark, commands) of each shell block, in order; the mark is what follows the language on the fence."""
    found = []
    for match in BLOCK.finditer((ROOT / "README.md").read_text()):
        language, _, mark = match["info"].strip().partition(" ")
        if language in SHELLS:
            found.append((mark.strip(), match["body"]))
    return found


def test_readme_every_shell_block_says_run_or_skip_with_a_reason():
    unmarked = [body for mark, body in shell_blocks() if mark != "run" and not re.fullmatch(r"skip: .{10,}", mark)]
    assert shell_blocks() and not unmarked, f"blocks without a mark: {unmarked}"


@pytest.mark.timeout(400)
def test_readme_run_blocks_succeed_in_order(tmp_path):
    script = "\n".join(body for mark, body in shell_blocks() if mark == "run")
    assert script, "README.md has no block marked `run`"
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
    finally:
        end(Home(tmp_path / "phalanx-home"), deadline_s=60)  # what a block that failed left running
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
