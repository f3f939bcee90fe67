"""Who may call what."""

from __future__ import annotations

from typing import Final

from phalanx.rpc import AGENTS, EVERYONE, OPERATORS, Access, Caller, Denied, Role

SERVICE: Final = "phalanx.api.data.v1.DataService"
ACCESS: Final[Access] = {
    f"/{SERVICE}/RegisterDataset": OPERATORS,
    f"/{SERVICE}/GetDataset": EVERYONE,
    f"/{SERVICE}/ListDatasets": EVERYONE,
    f"/{SERVICE}/GetReadingPlan": AGENTS,
    f"/{SERVICE}/ReportDamage": AGENTS,
    f"/{SERVICE}/ChangeMixture": OPERATORS,
    f"/{SERVICE}/ListDamage": EVERYONE,
}


def require_gang(caller: Caller, project: str, uid: str, attempt: int) -> None:
    """Raises Denied unless the caller's token was made for that attempt of that job; an agent's own is for no gang."""
    caller.require_job(project, uid, attempt)
    if caller.role is Role.AGENT and not caller.attempt:
        raise Denied(
            "scope of the token",
            value="no attempt",
            expected=f"a token for attempt {attempt} of {project}/{uid}",
            remedy="use the token that came with the order to start the gang",
        )
