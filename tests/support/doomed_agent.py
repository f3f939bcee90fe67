"""An agent that meets SIGKILL, or gives it to a rank, at points of what it does with copies in memory.

`DIES_AT=POINTS python doomed_agent.py --config FILE`; what it meets is told in its log as `doomed: <point> step <n>
sealed <n>`, by the share that it was busy with. The points:

push: half of a share has gone to the partner. seal: a step is known to be sealed, and older ones have just left. rank:
a rank hands over, and dies. store: the first object of a share has been created. give: another node asks for bytes.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from phalanx.agent import replica_client, replica_keeper, replica_server
from phalanx.agent.__main__ import main
from phalanx.agent.replica_wire import Wire
from phalanx.agent.replicas import Head, ReplicaMemory
from phalanx.objects import ObjectStore

ENOUGH_STEPS = 4  # of which copies are there
POINTS = frozenset(os.environ["DIES_AT"].split())


class Doom:
    """What the agent is busy with."""

    head: Head | None = None

    def meet(self, point: str, pid: int = 0) -> None:
        """SIGKILL to this process, or to another."""
        step, sealed = (self.head.kept.ref.step, self.head.sealed) if self.head is not None else (0, 0)
        sys.stderr.write(f"doomed: {point} step {step} sealed {sealed}\n")
        sys.stderr.flush()
        os.kill(pid or os.getpid(), signal.SIGKILL)

    @property
    def is_near(self) -> bool:
        """Whether a step is sealed that is not the first."""
        return self.head is not None and self.head.sealed >= ENOUGH_STEPS


DOOM = Doom()


class TornWire(Wire):
    """Sends the head and one object of a share."""

    num_sent = 0

    def send(self, data: memoryview) -> None:
        super().send(data)
        self.num_sent += 1
        if self.num_sent == 2 and DOOM.is_near:
            DOOM.meet("push")


def watch_memory() -> None:
    begin, taken_over = ReplicaMemory.begin, replica_keeper._taken_over

    def begun(self: ReplicaMemory, head: Head) -> None:
        begin(self, head)
        DOOM.head = head
        if "seal" in POINTS and DOOM.is_near:
            DOOM.meet("seal")

    def taken(head: Head, pid: int, descriptor: int) -> Any:
        if "rank" in POINTS and DOOM.is_near:
            DOOM.meet("rank", pid)
        return taken_over(head, pid, descriptor)

    ReplicaMemory.begin = begun  # type: ignore[method-assign]
    replica_keeper._taken_over = taken


def watch_storing() -> None:
    job_store = replica_keeper.job_store

    def doomed_store(job: Any) -> ObjectStore:
        store = job_store(job)
        create = store.create

        def created(key: str, data: Any) -> None:
            create(key, data)
            DOOM.meet("store")

        store.create = created  # type: ignore[method-assign]
        return store

    replica_keeper.job_store = doomed_store


def watch_giving() -> None:
    def give(self: Any, connection: Any, fields: Any) -> None:
        DOOM.meet("give")

    replica_server.ReplicaServer._give = give  # type: ignore[method-assign]


if __name__ == "__main__":
    watch_memory()
    if "push" in POINTS:
        replica_client.Wire = TornWire  # type: ignore[misc]
    if "store" in POINTS:
        watch_storing()
    if "give" in POINTS:
        watch_giving()
    sys.exit(main())
