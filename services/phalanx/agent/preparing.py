"""Has a job checked by `agent.prepare` in a process of its own, within a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError, Problems

NUM_LAST_LINES = 20


class StorageError(OutsideError):
    """The check ran, and storage did not answer it."""


def prepare(spec: Mapping[str, Any], world_size: int, origin: Mapping[str, Any] | None, deadline_s: float) -> Any:
    """What `agent.prepare` found out about the job. Raises PhalanxError or Problems for what the user must change,
    OutsideError where the check broke or took longer, StorageError where storage did.
    """
    return _asked({"spec": spec, "world_size": world_size, "origin": origin}, deadline_s)["prepared"]


def code_digest(own_code: Sequence[str], deadline_s: float) -> str:
    """The digest of the code on this node. Raises as `prepare` does."""
    return str(_asked({"own_code": list(own_code)}, deadline_s)["digest"])


def _asked(request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.agent.prepare", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        out, said = process.communicate(json.dumps(request), deadline_s)
    except subprocess.TimeoutExpired as error:
        raise OutsideError(f"the check of the job did not end within {deadline_s:g} s") from error
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        last = "\n".join(said.splitlines()[-NUM_LAST_LINES:])
        raise OutsideError(f"the check of the job ended with {process.returncode}:\n{last}")
    return _checked(json.loads(out))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "outside" in answer:
        raise StorageError(answer["outside"])
    if "problems" in answer:
        problems = [PhalanxError(each.pop("where"), **each) for each in answer["problems"]]
        raise problems[0] if len(problems) == 1 else Problems("job file", problems)
    return answer
