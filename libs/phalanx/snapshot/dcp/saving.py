"""A save that goes on in the background, and the rule that a process has one at a time."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, wait
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef
from phalanx.snapshot.dcp.failures import cause_of, told_plainly
from phalanx.snapshot.dcp.writer import PhalanxWriter

_LOG = logging.getLogger(__name__)


class Saving:
    """What `async_save` returns. A failure is raised by `result`, or by the next save where nobody has asked."""

    def __init__(self, step: int, writer: PhalanxWriter, future: Future[Any]) -> None:
        self.step, self._writer, self._future, self._seen = step, writer, future, False
        self._log_lock, self._logged = threading.Lock(), False
        future.add_done_callback(self._log)

    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> CheckpointRef:
        """The checkpoint, once it exists. Raises what the save failed with, OutsideError where it is not over within
        `timeout_s`.
        """
        if not wait([self._future], timeout_s).done:
            raise OutsideError(f"saving step {self.step} was not done within {timeout_s:g} s")
        self._seen = True
        self._log(self._future)
        with told_plainly():
            self._future.result()
        assert self._writer.ref is not None, "it was written"
        return self._writer.ref

    def failed_unseen(self) -> bool:
        """Waits for the end. Whether it was a failure that `result` has not raised yet."""
        error = self._future.exception()
        self._log(self._future)
        return error is not None and not self._seen

    def _log(self, future: Future[Any]) -> None:
        """Says once that it failed: before anybody is told otherwise, who may be told before a future calls back."""
        error = future.exception()
        with self._log_lock:  # whoever comes second goes on once it is said
            if error is not None and not self._logged:
                _LOG.warning("saving the checkpoint of step %d failed: %s", self.step, cause_of(error))
            self._logged = True


class _Flight:
    """The background save of this process, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Saving | None = None

    def begin(self, saving: Saving) -> None:
        with self._lock:
            self._last = saving

    def finish(self, group: dist.ProcessGroup | None) -> None:
        """Waits until none is in flight; raises, once, a failure that one of the ranks of `group` has not seen: so all
        ranks raise, or none.
        """
        with self._lock:
            last, self._last = self._last, None
        if last is not None and _any_rank(last.failed_unseen(), group):
            last.result()


def _any_rank(mine: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return mine
    flag = torch.tensor([int(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


flight = _Flight()
