"""Both controls behind one face, for the scenarios that they must pass alike: ranks are threads of this process that
share a key-value store, and what lies behind a control (storage, or an agent) can be away.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rank_server import JOB, RankServer
from torch.distributed import HashStore

from phalanx.api.agent.v1 import rank_service_pb2 as pb
from phalanx.core.box import Box, HeldTensor
from phalanx.core.digest import sha256
from phalanx.lineage import Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.objects.faults import FaultyStore, delay
from phalanx.snapshot.writer import Writer
from phalanx.trainer.agent_control import Agent, AgentControl, AgentPlace
from phalanx.trainer.control import Orders
from phalanx.trainer.exchange import Exchange
from phalanx.trainer.storage_control import Proposal, StorageControl

DIGESTS = {name: sha256(name.encode()) for name in ("code", "identity", "placement", "journal")}
WORLD_SIZE = 2
PATIENCE_S = 20.0
BATCH = 8
Result = TypeVar("Result")
AnyControl = StorageControl | AgentControl


@dataclass
class Ranks:
    """The controls of one attempt, and what their ranks reported as (rank, kind, fields)."""

    controls: list[AnyControl] = field(default_factory=list)
    told: list[tuple[int, str, Mapping[str, Any]]] = field(default_factory=list)

    def all(self, action: Callable[[AnyControl], Result]) -> list[Result]:
        """What `action` gives on every rank, each in its own thread; raises what rank 0's raised before the others'."""
        with ThreadPoolExecutor(len(self.controls)) as pool:
            futures = [pool.submit(action, control) for control in self.controls]
        return [future.result() for future in futures]

    def of(self, kind: str) -> list[tuple[int, Mapping[str, Any]]]:
        """Rank and fields of what was reported of one kind."""
        return [(rank, fields) for rank, name, fields in list(self.told) if name == kind]

    def phases(self, rank: int) -> list[tuple[str, int]]:
        """The phases that a rank told."""
        return [(fields["name"], fields["step"]) for each, fields in self.of("phase") if each == rank]

    def close(self) -> None:
        for control in self.controls:
            control.close()


class Side:
    """What lies behind the controls, over the job's root in a folder. plan_s: how long it may be away."""

    def __init__(self, folder: Path, plan_s: float = PATIENCE_S) -> None:
        self.store = open_store(folder.as_uri()).within("job/")
        self.lineage, self.plan_s = Lineage(self.store), plan_s
        self._opened: list[Ranks] = []

    def start(self) -> Ranks:
        """A new attempt, not yet opened by its ranks."""
        ranks = Ranks()
        store = HashStore()
        for rank in range(WORLD_SIZE):
            report = self._reporter(ranks, rank)
            ranks.controls.append(self.control(rank, Exchange(store, rank), report))
        self._opened.append(ranks)
        return ranks

    def _reporter(self, ranks: Ranks, rank: int) -> Callable[..., None]:
        return lambda kind, **fields: ranks.told.append((rank, kind, fields))

    def control(self, rank: int, exchange: Exchange, report: Callable[..., None]) -> AnyControl:
        raise NotImplementedError

    def order(self, ranks: Ranks, order: Orders) -> None:
        """As whoever is outside gives it."""
        raise NotImplementedError

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nothing answers meanwhile."""
        raise NotImplementedError
        yield

    def supersede(self) -> int:
        """Another start of the job, by whoever opens attempts."""
        opened = self.lineage.open_attempt(
            code_digest=DIGESTS["code"], identity_digest=DIGESTS["identity"], placement={"world_size": WORLD_SIZE}
        )
        return opened.number

    def close(self) -> None:
        for ranks in self._opened:
            ranks.close()

    def save(self, attempt: int, step: int, ranks: tuple[int, ...] = tuple(range(WORLD_SIZE))) -> None:
        """The parts of a checkpoint of one tensor, of which each rank holds a row."""
        for rank in ranks:
            row = HeldTensor("model.weight", (WORLD_SIZE, 3), Box((rank, 0), (1, 3)), torch.full((1, 3), float(step)))
            Writer(self.store, rank, WORLD_SIZE, deadline_s=PATIENCE_S).save(attempt, step, [row]).wait(PATIENCE_S)


class StorageSide(Side):
    """Storage alone."""

    def __init__(self, folder: Path, plan_s: float = PATIENCE_S) -> None:
        super().__init__(folder, plan_s)
        self._is_there = threading.Event()
        self._is_there.set()
        waits = delay(lambda call: True, lambda: self._is_there.wait(PATIENCE_S))
        self._slow: ObjectStore = FaultyStore(self.store, [waits])

    def control(self, rank: int, exchange: Exchange, report: Callable[..., None]) -> StorageControl:
        return StorageControl(
            Lineage(self._slow),
            self._slow,
            exchange,
            Proposal(DIGESTS["code"], DIGESTS["identity"], {"world_size": WORLD_SIZE}),
            rank=rank,
            world_size=WORLD_SIZE,
            deadline_s=self.plan_s,
            report=report,
        )

    def order(self, ranks: Ranks, order: Orders) -> None:
        """As a signal to some rank."""
        control = ranks.controls[0]
        assert isinstance(control, StorageControl)
        control.give(order)

    @contextmanager
    def away(self) -> Iterator[None]:
        self._is_there.clear()
        yield
        self._is_there.set()


class AgentSide(Side):
    """An agent on a Unix socket, which opens the attempts as train does."""

    def __init__(self, folder: Path, plan_s: float = PATIENCE_S) -> None:
        super().__init__(folder, plan_s)
        self.server = RankServer(Path(f"/tmp/phalanx-{os.getpid()}-{id(self):x}/agent.sock"), self.store)
        self.server.start()
        self._attempt = 0

    def start(self) -> Ranks:
        self._attempt = self.supersede()
        return super().start()

    def control(self, rank: int, exchange: Exchange, report: Callable[..., None]) -> AgentControl:
        return AgentControl(
            Agent(AgentPlace(self.server.socket, JOB, self._attempt)),
            self.lineage,
            exchange,
            rank=rank,
            plan_s=self.plan_s,
            enter=lambda name, step: report("phase", name=name, step=step),
            report=report,
        )

    def order(self, ranks: Ranks, order: Orders) -> None:
        """As train gives it to the agent."""
        numbers = {Orders.STOP: pb.RANK_ORDER_STOP, Orders.CHECKPOINT: pb.RANK_ORDER_CHECKPOINT}
        self.server.give(numbers[order])

    @contextmanager
    def away(self) -> Iterator[None]:
        self.server.stop()
        yield
        self.server.start()

    def close(self) -> None:
        super().close()
        self.server.stop()
        self.server.socket.unlink(missing_ok=True)
        self.server.socket.parent.rmdir()


def draft(attempt: int, step: int) -> Manifest:
    """What a rank hands over to be committed."""
    return Manifest(
        attempt=attempt,
        step=step,
        world_size=WORLD_SIZE,
        identity_digest=DIGESTS["identity"],
        placement_digest=DIGESTS["placement"],
        code_digest=DIGESTS["code"],
        journal_digest=DIGESTS["journal"],
        loader=LoaderState(step, step * BATCH),
        schedule={"num_updates": step, "loss_scale": 0.5},
        records=(),
        parts=(),
    )
