"""docs/checkpoint-torch.md is executed in one folder: its Python blocks in order in one program, then its shell one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoint-torch.md"


def blocks(language: str) -> str:
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.timeout(300)
def test_checkpoint_torch_page_runs_as_it_stands(tmp_path: Path) -> None:
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    for command in ([sys.executable, "-c", blocks("python")], ["bash", "-euxo", "pipefail", "-c", blocks("bash")]):
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "whole" in done.stdout
