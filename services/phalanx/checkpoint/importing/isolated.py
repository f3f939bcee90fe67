"""Has pickles read by `unpickle.py` in a process of its own: one that imports nothing of ours, has no environment, and
whose memory, time and output are limited. This process sees its answer, which is JSON, and nothing of the pickles.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.core.errors import PhalanxError

_PROGRAM = Path(__file__).with_name("unpickle.py")
_REMEDY = "if you trust it, load it with torch and save it as safetensors"


@dataclass(frozen=True, slots=True)
class Limits:
    """What reading a batch of pickles may cost. input_bytes: of the pickles; output_bytes: of the answer."""

    input_bytes: int = 256 << 20
    memory_bytes: int = 4 << 30
    output_bytes: int = 1 << 30
    cpu_s: int = 120


LIMITS = Limits()


def unpickled(
    where: str,
    kind: Literal["metadata", "tensors", "numbers"],
    pickles: Sequence[bytes],
    limits: Limits = LIMITS,
    *,
    names: Sequence[str] = (),
    remedy: str = _REMEDY,
) -> list[dict[str, Any]]:
    """What each pickle says, as plain values; see `unpickle.py`. where: names them all in errors, names: each of them,
    remedy: is what the error of one says.

    Raises PhalanxError for pickles that hold anything else than torch writes there, and past a limit.
    """
    given = sum(map(len, pickles))
    if given > limits.input_bytes:
        raise _refused(where, f"{given} bytes", f"at most {limits.input_bytes} bytes")
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        for each in pickles:
            stdin.write(len(each).to_bytes(8, "little"))
            stdin.write(each)
        stdin.seek(0)
        code = _run(where, kind, stdin.fileno(), stdout.fileno(), limits)
        stdout.seek(0)
        answer = stdout.read()
    if code != 0:
        raise _refused(where, f"a pickle whose reader ended with {code}", "one that is read within the limits")
    found = json.loads(answer)
    if "refused" in found:
        one = names[found["number"]] if names else where
        expected = f"a pickle with what torch writes as {kind} alone"
        raise _refused(one, f"a pickle that {found['refused']}", expected, remedy)
    rows: list[dict[str, Any]] = found["found"]
    return rows


def _run(where: str, kind: str, stdin: int, stdout: int, limits: Limits) -> int:
    """Runs the program to its end; its exit code."""
    command = [sys.executable, "-I", "-S", "-B", str(_PROGRAM), kind, str(limits.memory_bytes), str(limits.cpu_s)]
    libraries = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd="/", env=libraries
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limits.output_bytes, limits.output_bytes))
        try:
            return process.wait(timeout=2 * limits.cpu_s + 30)
        except subprocess.TimeoutExpired:
            raise _refused(where, "a pickle without end", "one that is read within the limits") from None
        finally:
            process.kill()


def _refused(where: str, value: str, expected: str, remedy: str = _REMEDY) -> PhalanxError:
    return PhalanxError(where, value=value, expected=f"{expected}; nothing of it was run", remedy=remedy)
