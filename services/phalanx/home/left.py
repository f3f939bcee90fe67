"""What a supervisor that was killed left behind: its processes end by themselves, the agent once its ranks have
committed, then the services (`child`). Whoever starts the home again, or ends it, waits for that, for a bounded time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from phalanx.agent.ending import read_end
from phalanx.core.errors import OutsideError
from phalanx.home.layout import AGENT, Home
from phalanx.home.places import Living, at, living

AGENT_END_S, SERVICE_END_S = 35.0, 20.0  # beyond the grace of ranks: their end, and that of the process
_HURRIED_S, _KILLED_S, _PAUSE_S = 35.0, 5.0, 0.1


def end_left(home: Home, tell: Callable[[str], None], is_stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """Returns once none of the home's processes lives; what ranks did not commit. tell: takes what is waited for.
    is_stopped: whether the wait is to be given up.

    Call only while no supervisor lives. Raises OutsideError for a process that survives SIGKILL.
    """
    left = living(home)
    if not left:
        return []
    tell(f"the supervisor of {home.folder} was killed; what it left has to end first: {', '.join(map(str, left))}")
    lost: list[str] = []
    for each in left:
        if each.name == AGENT:
            tell(f"{each}: its ranks commit first, for {each.grace_s:g} s at most")
        lost += _ended(home, each, tell, is_stopped)
        if is_stopped():
            break
    for line in lost:
        tell(line)
    return lost


def _ended(home: Home, process: Living, tell: Callable[[str], None], is_stopped: Callable[[], bool]) -> list[str]:
    """Waits for one: it knows already that it is to end. Then a second word, which ends an agent's ranks at once; then
    SIGKILL.
    """
    is_agent = process.name == AGENT
    steps = (
        (None, process.grace_s + AGENT_END_S if is_agent else SERVICE_END_S),
        (signal.SIGTERM, _HURRIED_S if is_agent else SERVICE_END_S),
        (signal.SIGKILL, _KILLED_S),
    )
    for signum, patience_s in steps:
        if signum is not None and at(home, process.name) == process:
            tell(f"{process} does not end: {signum.name}")
            try:
                os.kill(process.pid, signum)
            except ProcessLookupError:
                break
        end_s = time.monotonic() + patience_s
        while at(home, process.name) == process and time.monotonic() < end_s and not is_stopped():
            time.sleep(_PAUSE_S)
        if is_stopped():
            return []
        if at(home, process.name) != process:
            break
    else:
        raise OutsideError(f"{process} of {home.folder} survives SIGKILL")
    if not is_agent:
        return []
    killed = read_end(home.agent_state, process.pid)
    if killed is None:
        return [f"{process} ended without a word: its ranks may not have committed"]
    return [str(each) for each in killed]
