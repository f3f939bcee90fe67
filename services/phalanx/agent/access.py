"""Who may call what the agent serves: ranks of this node, by a socket that only their user reaches."""

from __future__ import annotations

from phalanx.rpc.handlers import Access
from phalanx.rpc.tokens import AGENTS

_SERVICE = "/phalanx.api.agent.v1.RankService"
ACCESS: Access = {
    f"{_SERVICE}/Open": AGENTS,
    f"{_SERVICE}/Renew": AGENTS,
    f"{_SERVICE}/RefuseParent": AGENTS,
    f"{_SERVICE}/ReportShardDamage": AGENTS,
    f"{_SERVICE}/WatchOrders": AGENTS,
    f"{_SERVICE}/Commit": AGENTS,
    f"{_SERVICE}/HandOver": AGENTS,
    f"{_SERVICE}/FindShares": AGENTS,
    f"{_SERVICE}/ReadShare": AGENTS,
}
