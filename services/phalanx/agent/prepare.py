"""`python -m phalanx.agent.prepare PARENT_PID`: checks a job in a process of its own, because a check may import torch
and the user's code. The request comes on stdin, the answer goes to stdout, both one JSON object.

Request: {"spec": tables, "world_size": n, "origin": null or {spec, attempt, step}}, or {"own_code": [...]} for the
digest of the code alone. Answer: {"prepared": {...}}, {"digest": "sha256:..."}, {"problems": [{where, value, expected,
remedy}]} or {"outside": "..."}. Whatever else is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError, Problems
from phalanx.gang.linux import die_with_parent


def main() -> None:
    """One request, one answer; an unexpected error ends the process with a traceback. It dies with whoever asks."""
    die_with_parent(int(sys.argv[1]))
    answers = os.dup(1)
    os.dup2(2, 1)  # what the user's modules print is no answer
    answer = answered(json.load(sys.stdin))
    with os.fdopen(answers, "w") as out:
        json.dump(answer, out)


def answered(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    try:
        if "own_code" in request:
            return {"digest": digest_of_code(request["own_code"])}
        return {"prepared": prepared(request)}
    except Problems as error:
        return {"problems": [_plain(problem) for problem in error.problems]}
    except PhalanxError as error:
        return {"problems": [_plain(error)]}
    except OutsideError as error:
        return {"outside": str(error)}


def prepared(request: Mapping[str, Any]) -> dict[str, Any]:
    """What `agent.v1.Prepared` holds. Raises PhalanxError for whatever the user must change."""
    from phalanx.spec import parse_job
    from phalanx.trainer.preflight import Origin, prepare, to_arguments

    world_size = int(request["world_size"])
    job = parse_job(request["spec"], world_size)
    found = prepare(job, world_size, origin=Origin.from_json(request["origin"]) if request.get("origin") else None)
    return {
        "arguments": to_arguments(found),
        "identity_digest": found.identity_digest,
        "code_digest": found.code_digest,
        "warnings": [*found.said, *found.warnings],
        "placement": found.job.placement(world_size),
    }


def digest_of_code(own_code: Sequence[str]) -> str:
    """The digest of the code on this node."""
    from phalanx.trainer.code import code_digest, import_own

    import_own(own_code)
    return code_digest(*own_code)


def _plain(error: PhalanxError) -> dict[str, Any]:
    value = error.value if isinstance(error.value, str | int | float | bool | None) else str(error.value)
    return {"where": error.where, "value": value, "expected": error.expected, "remedy": error.remedy}


if __name__ == "__main__":
    main()
