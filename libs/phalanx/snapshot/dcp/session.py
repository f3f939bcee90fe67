"""What this process is in the lineage of a job: which attempt it writes as, and from which checkpoint that began.

torch makes a new StorageWriter for each save, but a start of a program is one attempt, whatever number of saves it
makes. So a process keeps one `Session` for each URL (`session_at`), and with it the memory that saves are staged in.

The attempt is opened by the first save, and begins where the program did: at the checkpoint that it loaded last, or, if
it loaded none, at the newest one. Saving a step that is not after that one is refused. A program that goes back (it
loads an older checkpoint and saves steps again) goes on in a new attempt; so does one that repeats a step whose save
failed. Only the coordinator of a save asks; the other ranks hear the attempt with their plan.

Saves and loads count in the order in which the program called them (`line`), whenever the thread of a save comes to
ask.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.digest import digest_of, sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import Attempt, CheckpointRef, Lineage
from phalanx.objects import ObjectStore, StorageSettings, open_store
from phalanx.snapshot.dcp.line import Line
from phalanx.snapshot.dcp.staging import Staging

IDENTITY_DIGEST = digest_of({"writer": "torch.distributed.checkpoint"})

_sessions: dict[tuple[int, str, StorageSettings | None], Session] = {}
_sessions_lock = threading.Lock()


def session_at(url: str, settings: StorageSettings | None) -> Session:
    """This process' session at `url`; one of its own after a fork."""
    store = open_store(url, settings)
    key = (os.getpid(), store.url, settings)
    with _sessions_lock:
        return _sessions.setdefault(key, Session(store))


class Session:
    """A process at one job root. Safe for several threads."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.lineage, self.staging, self.line = store, Lineage(store), Staging(), Line()
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._loads: list[tuple[int, CheckpointRef]] = []  # with their order; those after the last save that began
        self._begun: dict[int, int] = {}  # the order of each step that the attempt began to save
        self._begun_step = self._committed_step = -1

    def loaded(self, ref: CheckpointRef) -> None:
        """The program's state is that of checkpoint `ref` now."""
        order = self.line.next_order()
        with self._lock:
            self._loads.append((order, ref))

    def begin(self, step: int, placement: Mapping[str, Any], order: int | None = None) -> Attempt:
        """The attempt under which `step` is saved, opened where it has to be. order: of the call that saves it among
        all calls, None for a call of this moment. Raises PhalanxError for a step that cannot follow, and where another
        program has opened an attempt since.
        """
        order = self.line.next_order() if order is None else order
        with self._lock:
            loads = [load for load in self._loads if load[0] < order]
            begins_from = max(loads)[1] if loads else None
            may_go_back = begins_from is not None or self._begun_step != self._committed_step
            if self._attempt is not None and not self._follows(step, order) and not may_go_back:
                raise _step_refused(self.store.url, step, self._begun_step, "that this program has saved")
            if self._attempt is None or not self._follows(step, order):
                self._attempt = self._open(step, placement, begins_from)
                self._begun, self._begun_step, self._committed_step = {}, -1, -1
            self._require_newest(self._attempt)
            self._begun[step], self._begun_step = order, max(step, self._begun_step)
            self._loads = [load for load in self._loads if load[0] > order]
            return self._attempt

    def committed(self, step: int) -> None:
        """The save of `step` is over, and its checkpoint exists."""
        with self._lock:
            self._committed_step = max(step, self._committed_step)

    def _follows(self, step: int, order: int) -> bool:
        """Whether `step` goes on in the attempt: it is the next, or was called before the saves of all later steps."""
        assert self._attempt is not None, "asked of one"
        if step > self._begun_step:
            return True
        later = [found for begun, found in self._begun.items() if begun >= step]
        return step > self._attempt.start_step and step not in self._begun and order < min(later, default=0)

    def _open(self, step: int, placement: Mapping[str, Any], begins_from: CheckpointRef | None) -> Attempt:
        self._require_own_kind()
        live = self.lineage.checkpoints()
        parent = begins_from or max(live, default=None)
        if parent is not None and parent not in live:
            raise PhalanxError(
                f"checkpoint {parent} at {self.store.url}, from which this program began",
                expected="a live one, but another program has gone on from an earlier one since",
                remedy="load again, or save under another URL",
            )
        if parent is not None and step <= parent.step:
            what = "from which this program began" if begins_from else "the newest there, which was not loaded"
            raise _step_refused(self.store.url, step, parent.step, what)
        attempt = self.lineage.open_attempt(
            code_digest=_code_digest(),
            identity_digest=IDENTITY_DIGEST,
            placement=placement,
            avoid=[ref for ref in live if parent is not None and ref > parent],
        )
        if attempt.parent != parent:
            raise PhalanxError(
                f"job at {self.store.url}",
                value=f"a checkpoint of {attempt.parent}",
                expected=f"{parent or 'none'} to be the newest: another program saves there at this moment",
                remedy="let one program at a time save under a URL",
            )
        return attempt

    def _require_own_kind(self) -> None:
        if self.lineage.read_job() is not None:
            raise PhalanxError(
                f"job at {self.store.url}",
                expected="a place of your program's own, but this is a job of `phalanx run`",
                remedy="save under another URL (loading from it is fine)",
            )

    def _require_newest(self, attempt: Attempt) -> None:
        newest = self.lineage.newest_attempt()
        if newest is None or newest.number != attempt.number:
            raise PhalanxError(
                f"attempt {attempt.number} at {self.store.url}",
                expected=f"to be the newest, but {newest and newest.number} has been opened since by another program",
                remedy="let that one go on (nothing is lost), or stop it and start this one again",
            )


def _step_refused(url: str, step: int, last: int, which: str) -> PhalanxError:
    return PhalanxError(
        f"step of the checkpoint at {url}",
        value=step,
        expected=f"a step after {last}, {which}",
        remedy="load the checkpoint from which to go on first, or save under another URL",
    )


def _code_digest() -> str:
    """Of the program's main file; of nothing where it has none (a notebook)."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return sha256(b"")
    with Path(path).open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
