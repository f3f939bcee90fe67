"""Gangs: ranks forked from a preloaded server, watched, ended together, with the first cause of a failure named. No
torch at import.
"""

from phalanx.gang.budget import Budget
from phalanx.gang.cause import Cause, first_of_hosts
from phalanx.gang.context import RankContext, torchrun_context
from phalanx.gang.fork_server import ForkServer, GangBusyError
from phalanx.gang.gang import Gang, GangOutcome
from phalanx.gang.order import Event, GangOrder, RankExit, Rendezvous
from phalanx.gang.rendezvous import init_process_group
from phalanx.gang.supervise import StopSignals, supervise
from phalanx.gang.watch import Watch

__all__ = [
    "Budget",
    "Cause",
    "Event",
    "ForkServer",
    "Gang",
    "GangBusyError",
    "GangOrder",
    "GangOutcome",
    "RankContext",
    "RankExit",
    "Rendezvous",
    "StopSignals",
    "Watch",
    "first_of_hosts",
    "init_process_group",
    "supervise",
    "torchrun_context",
]
