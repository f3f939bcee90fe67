"""What an agent does with shares: takes those of its ranks, has the partner keep them too, stores those of a step when
train asks for it after the end of the attempt, and gets for its ranks what other nodes keep of their parent.

Storing is creating the very objects that a save would have created, part objects last, then the commit of any other
checkpoint; killed anywhere, it leaves what a killed save leaves, and may be asked for again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration

from phalanx.agent.gangs import GangKey
from phalanx.agent.replica_client import push
from phalanx.agent.replica_reader import ReplicaReader
from phalanx.agent.replicas import Head, Held, ReplicaMemory, check_digests, mapped
from phalanx.api.checkpoint.v1 import checkpoint_service_pb2 as checkpoint_pb
from phalanx.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from phalanx.core import anonymous
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, keys
from phalanx.objects import ObjectExists, ObjectMissing, ObjectStore
from phalanx.rpc.client import Channel
from phalanx.rpc.config import Credentials
from phalanx.rpc.errors import FailedPrecondition
from phalanx.snapshot.replicas import Kept
from phalanx.spec import Job
from phalanx.trainer.places import job_store

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempted:
    """The newest attempt of a job here. partner: host:port, "" for none. token: of the attempt. parent: the checkpoint
    that it begins with; holders: who else keeps shares of it, host:port by the rank of the share.
    """

    key: GangKey
    job: Job
    partner: str
    token: str = field(repr=False)
    parent: CheckpointRef | None = None
    holders: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


class ReplicaKeeper:
    """Shares of all jobs of this node. checkpoint: a channel without a token. Safe from any thread."""

    def __init__(self, memory: ReplicaMemory, credentials: Credentials, checkpoint: Channel) -> None:
        self.memory = memory
        self._credentials, self._checkpoint = credentials, CheckpointServiceStub(checkpoint)
        self._reader = ReplicaReader(credentials)
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempted] = {}

    def open(self, attempted: Attempted) -> None:
        """Ranks of the attempt are about to start. One that is older than the job's newest here is left out."""
        with self._lock:
            known = self._attempts.get(attempted.key.job)
            if known is not None and known.key.attempt > attempted.key.attempt:
                return
            self._attempts[attempted.key.job] = attempted
        self._reader.begin(attempted.key.job)

    def forget(self, job: str) -> None:
        """The job is over."""
        with self._lock:
            self._attempts.pop(job, None)
        self._reader.begin(job)
        self.memory.forget(job)

    def hand_over(self, head: Head, pid: int, descriptor: int, deadline_s: float) -> None:
        """Keeps the share that lies in an anonymous file of a rank, here and with the partner. Raises OutsideError
        where one of them can't, PhalanxError for what is not to be kept.
        """
        attempted = self._attempted(GangKey(head.job, head.kept.ref.attempt))
        self.memory.begin(head)
        try:
            held = _taken_over(head, pid, descriptor)
            self.memory.finish(held)
        finally:
            self.memory.give_up(head)
        if attempted.partner:
            push(attempted.partner, self._credentials, attempted.token, held, deadline_s)

    def is_elsewhere(self, key: GangKey, ref: CheckpointRef) -> bool:
        """Whether other nodes are known to keep shares of a step for an attempt of this node."""
        with self._lock:
            found = self._attempts.get(key.job)
        return found is not None and found.key == key and found.parent == ref and bool(found.holders)

    def read(self, key: GangKey, object_key: str, offset: int, into: memoryview, deadline_s: float) -> int:
        """Fills `into` with bytes of an object of the parent that other nodes keep; the size of the whole object.
        Raises OutsideError where none of them gives it within the deadline.
        """
        attempted, writer = self._attempted(key), keys.writer(object_key)
        if writer is None or writer[0] != attempted.parent:
            raise OutsideError(f"{object_key} is in no share of {attempted.parent}")
        holders = attempted.holders.get(writer[1], ())
        return self._reader.read(key.job, holders, attempted.token, object_key, offset, into, deadline_s)

    def kept(self, job: str) -> list[Kept]:
        """What lies here of a job."""
        return self.memory.kept(job)

    def store(self, key: GangKey, step: int) -> None:
        """Creates the objects of a step of the attempt that lie here and not in storage. Raises what the store
        raises, OutsideError before anything of a share with other bytes than were announced.
        """
        store, ref = job_store(self._attempted(key).job), CheckpointRef(key.attempt, step)
        for held in self.memory.held(key.job, ref):
            check_digests(held)
            _store(store, held)

    def commit(self, key: GangKey, step: int, deadline_s: float) -> None:
        """Commits the step, all of whose objects are stored. Raises what the checkpoint service raises, and
        FailedPrecondition where this node does not have its draft.
        """
        attempted, ref = self._attempted(key), CheckpointRef(key.attempt, step)
        drafts = [held.head.draft for held in self.memory.held(key.job, ref) if held.head.draft]
        if not drafts:
            raise FailedPrecondition(str(ref), expected="the share of rank 0 in memory", remedy="ask another node")
        draft = checkpoint_pb.ManifestDraft.FromString(drafts[0])
        shown = (("authorization", f"Bearer {attempted.token}"),)
        begin = checkpoint_pb.BeginCheckpointRequest(job=key.job, ref=draft.ref, world_size=draft.world_size)
        self._checkpoint.BeginCheckpoint(begin, timeout=deadline_s, metadata=shown)
        allowed = Duration()
        allowed.FromNanoseconds(int(deadline_s * 1e9))
        request = checkpoint_pb.CommitCheckpointRequest(job=key.job, draft=draft, deadline=allowed)
        self._checkpoint.CommitCheckpoint(request, timeout=deadline_s, metadata=shown)

    def _attempted(self, key: GangKey) -> Attempted:
        with self._lock:
            found = self._attempts.get(key.job)
        if found is None or found.key != key:
            raise FailedPrecondition(
                str(key), expected="the newest attempt that this node had ranks of", remedy="go on from storage"
            )
        return found


def _taken_over(head: Head, pid: int, descriptor: int) -> Held:
    """The memory of a rank, mapped here too: it outlives the rank."""
    try:
        file = anonymous.opened(pid, descriptor, head.num_bytes)
        if file is not None:
            return mapped(head, file)
    except OSError as error:
        raise OutsideError(f"the rank with pid {pid} is gone with its share: {error}") from error
    raise PhalanxError(
        "share",
        value=f"descriptor {descriptor}",
        expected=f"at least {head.num_bytes} bytes of anonymous memory that can't shrink",
        remedy="hand over another step",
    )


def _store(store: ObjectStore, held: Held) -> None:
    for each in held.head.objects:
        try:
            if store.info(each.ref.key).num_bytes == each.ref.num_bytes:
                continue
        except ObjectMissing:
            pass
        try:
            with held.view(each) as view:
                store.create(each.ref.key, view)
        except ObjectExists:
            LOG.info("%s was stored by another node", each.ref.key)
