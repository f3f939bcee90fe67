"""Who may call what."""

from __future__ import annotations

from typing import Final

from phalanx.lineage.registry import JobName
from phalanx.rpc import AGENTS, EVERYONE, OPERATORS, VIEWERS, Access, Caller, Denied

SERVICE: Final = "phalanx.api.checkpoint.v1.CheckpointService"
ACCESS: Final[Access] = {
    f"/{SERVICE}/BeginCheckpoint": AGENTS,
    f"/{SERVICE}/CommitCheckpoint": AGENTS,
    f"/{SERVICE}/AbortCheckpoint": AGENTS,
    f"/{SERVICE}/ReportDamage": AGENTS,
    f"/{SERVICE}/ResolveCheckpoint": EVERYONE,
    f"/{SERVICE}/ListCheckpoints": EVERYONE,
    f"/{SERVICE}/VerifyCheckpoint": VIEWERS,
    f"/{SERVICE}/PinCheckpoint": OPERATORS,
    f"/{SERVICE}/UnpinCheckpoint": OPERATORS,
    f"/{SERVICE}/DeleteCheckpoint": OPERATORS,
    f"/{SERVICE}/PruneCheckpoints": OPERATORS,
}


def require_gang(caller: Caller, job: JobName, attempt: int) -> None:
    """Raises Denied unless the caller's token was made for that attempt of that job; an agent's own is for no gang."""
    caller.require_job(job.project, job.uid, attempt)
    if not caller.attempt:
        raise Denied(
            "scope of the token",
            value="no attempt",
            expected=f"a token for attempt {attempt} of {job}",
            remedy="use the token that came with the order to start the gang",
        )
