"""The AWS module and its example: format, validity, and their own tests against a mocked provider."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "terraform_test.sh"
NOT_TO_BE_HAD = 77


@pytest.mark.timeout(400)
def test_terraform_module_and_example_pass_their_own_tests():
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True, timeout=390, check=False)
    if done.returncode == NOT_TO_BE_HAD:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.count("Success! The configuration is valid.") == 2
    assert done.stdout.count(" passed, 0 failed.") == 2


def test_terraform_absent_the_script_says_so_with_its_own_exit_code(tmp_path):
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(f"/usr/bin/{program}")
    done = subprocess.run(
        ["/usr/bin/bash", SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (NOT_TO_BE_HAD, "terraform tests skipped: no terraform on PATH\n")


def test_terraform_misformatted_fails(tmp_path):
    if not any((Path(folder) / "terraform").exists() for folder in os.get_exec_path()):
        pytest.skip("no terraform on PATH")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "infra" / "terraform").mkdir(parents=True)
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    (tmp_path / "infra" / "terraform" / "main.tf").write_text("locals {\na=1\n}\n")
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / SCRIPT.name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode not in (0, NOT_TO_BE_HAD) and "main.tf" in done.stdout
