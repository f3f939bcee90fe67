"""Python processes that work for this one: started plainly, killed on the way out, never left behind.

Each ends by itself when its standard input does, so nothing outlives whoever started it, even by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from phalanx.core.errors import OutsideError

_ENDING_S = 10.0


def start(module: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with pipes to its standard input and output; environ: on top of ours."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environ, "PYTHONPATH": paths},
        start_new_session=True,  # an interrupt at the terminal is for whoever started it
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Kills the process if it lives; its exit code. Raises OutsideError where it does not end."""
    process.kill()
    try:
        code = process.wait(_ENDING_S)
    except subprocess.TimeoutExpired as error:
        raise OutsideError(f"process {process.pid} does not end after SIGKILL") from error
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # what it had not read goes with it
            if pipe is not None:
                pipe.close()
    return code


def how_it_ended(code: int, remedy: str) -> str:
    """An exit code in words; remedy: what takes less memory."""
    if code == -signal.SIGKILL:
        return f"killed by SIGKILL, as a system that is out of memory does ({remedy})"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
