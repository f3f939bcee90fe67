"""Who may call what."""

from __future__ import annotations

from typing import Final

from phalanx.rpc import AGENTS, OPERATORS, SERVICES, VIEWERS, Access

TRAIN: Final = "phalanx.api.train.v1.TrainService"
AGENT: Final = "phalanx.api.agent.v1.AgentService"
ACCESS: Final[Access] = {
    f"/{TRAIN}/SubmitJob": OPERATORS,
    f"/{TRAIN}/ForkJob": OPERATORS,
    f"/{TRAIN}/GetJob": VIEWERS | SERVICES,
    f"/{TRAIN}/ListJobs": VIEWERS | SERVICES,
    f"/{TRAIN}/WatchJob": VIEWERS | SERVICES,
    f"/{TRAIN}/ReadJobLogs": VIEWERS,
    f"/{TRAIN}/StopJob": OPERATORS,
    f"/{TRAIN}/SuspendJob": OPERATORS,
    f"/{TRAIN}/ResumeJob": OPERATORS,
    f"/{TRAIN}/CheckpointJob": OPERATORS,
    f"/{TRAIN}/TakeJobStacks": OPERATORS,
    f"/{TRAIN}/ListNodes": VIEWERS | SERVICES,
    f"/{TRAIN}/WatchRecords": SERVICES,
    f"/{TRAIN}/ReportIncident": SERVICES,
    f"/{AGENT}/Connect": AGENTS,
}
