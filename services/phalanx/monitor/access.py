"""Who may call what. A token for one project or job sees the runs of that project or job."""

from __future__ import annotations

from typing import Final

from phalanx.lineage.registry import JobName
from phalanx.rpc import EVERYONE, VIEWERS, Access, Caller, Denied, Role

SERVICE: Final = "phalanx.api.monitor.v1.MonitorService"
OTLP: Final = "opentelemetry.proto.collector"
SENDERS: Final = frozenset({Role.AGENT, Role.SERVICE, Role.OPERATOR})
ACCESS: Final[Access] = {
    f"/{SERVICE}/ListRuns": VIEWERS,
    f"/{SERVICE}/GetRun": VIEWERS,
    f"/{SERVICE}/WatchRun": VIEWERS,
    f"/{SERVICE}/ListIncidents": VIEWERS,
    f"/{SERVICE}/ListGpus": EVERYONE,
    f"/{OTLP}.trace.v1.TraceService/Export": SENDERS,
    f"/{OTLP}.metrics.v1.MetricsService/Export": SENDERS,
    f"/{OTLP}.logs.v1.LogsService/Export": SENDERS,
}


def require_job(caller: Caller, job: str) -> None:
    """Raises PhalanxError for a name that is none, Denied for a job outside of the caller's scope."""
    name = JobName.parse(job)
    caller.require_job(name.project, name.uid)


def may_see(caller: Caller, job: str) -> bool:
    """Whether the job lies in the caller's scope; "" (no job's) for those whose scope is everything."""
    if not job:
        return not caller.project
    try:
        require_job(caller, job)
    except Denied:
        return False
    return True
