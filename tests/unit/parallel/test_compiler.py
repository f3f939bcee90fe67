"""The compiler of compiled blocks: a file that it was killed at is not there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.parallel.compiler import compiler_script

HALF = """#!/bin/sh
if [ "$1" = --version ]; then echo a compiler; exit 0; fi
while [ "$1" != -o ]; do shift; done
echo half >"$2"
echo begun
read line <"$PIPE"
"""
BLOCK = """
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from phalanx.parallel.compiler import write_whole_files
write_whole_files()
write_whole_files()
compiled = torch.compile(lambda x: (x.sin() * 2).cos())
x = torch.linspace(0, 1, 64)
assert torch.allclose(compiled(x), (x.sin() * 2).cos())
print(get_cpp_compiler())
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler():
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    return "g++"


def test_file_that_the_compiler_was_killed_at_is_not_there(tmp_path, compiler):
    pipe, out, source = tmp_path / "pipe", tmp_path / "it's here.so", tmp_path / "a.cpp"
    os.mkfifo(pipe)
    source.write_text("int f() { return 1; }\n")
    slow = executable(tmp_path / "slow", compiler_script(str(executable(tmp_path / "half", HALF))))
    command = ["-shared", "-fPIC", str(source), "-o", str(out)]
    with subprocess.Popen(
        [slow, *command], env=os.environ | {"PIPE": str(pipe)}, stdout=subprocess.PIPE, start_new_session=True
    ) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"begun\n"
        os.killpg(killed.pid, signal.SIGKILL)
    assert not out.exists() and [path.suffix for path in tmp_path.glob("it's*")] == [".part"]
    whole = executable(tmp_path / "whole", compiler_script(compiler))
    subprocess.run([whole, *command], check=True, timeout=60)
    assert out.read_bytes()[:4] == b"\x7fELF" and list(tmp_path.glob("it's*")) == [out]


def test_what_the_compiler_refuses_is_told_and_leaves_nothing(tmp_path, compiler):
    source, out = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text("int f( { }\n")
    script = executable(tmp_path / "g++", compiler_script(compiler))
    done = subprocess.run([script, "-c", source, "-o", out], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "error" in done.stderr and list(tmp_path.glob("a.o*")) == []
    assert subprocess.run([script, "--version"], timeout=60, check=False).returncode == 0


@pytest.mark.timeout(240)
def test_blocks_are_compiled_by_it(tmp_path, compiler):
    cache = tmp_path / "cache"
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCK], env=environ, capture_output=True, text=True, timeout=230, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(cache / "phalanx-g++")
    assert list(cache.rglob("*.so")) and not list(cache.rglob("*.part"))
