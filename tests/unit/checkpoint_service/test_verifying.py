"""The service's check of a checkpoint: whatever ends it reaches whoever waits for it."""

from __future__ import annotations

import threading

import pytest
from support.checkpoints import open_attempt, save

from phalanx.checkpoint.facts import Policy
from phalanx.checkpoint.holds import Holds
from phalanx.checkpoint.jobs import HostedJob
from phalanx.checkpoint.verifying import Verifier
from phalanx.lineage import CheckpointRef
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, fail_before, on

REF = CheckpointRef(1, 5)


@pytest.mark.timeout(30)
def test_check_that_breaks_in_an_unforeseen_way_ends_with_that_error_and_frees_its_place():
    store = open_store("memory://")
    open_attempt(store)
    save(store, REF)
    broken = FaultyStore(store, [fail_before(on("read", "objects/"), RuntimeError("nobody thought of this"))])
    verifier = Verifier(Holds(), max_at_once=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nobody thought of this"):
            list(verifier.run(HostedJob(JobName("p", "j"), broken, Policy(), None), REF, threading.Event()))
    steps = list(verifier.run(HostedJob(JobName("p", "j"), store, Policy(), None), REF, threading.Event()))
    assert steps[-1].findings == ()
