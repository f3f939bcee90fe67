"""`phalanx checkpoint prune` straight on storage."""

from __future__ import annotations

import json

import pytest
from support.checkpoints import IDENTITY, open_attempt, register, restores, save, spec_of, write_parts
from typer.testing import CliRunner

from phalanx.checkpoint.pins import PinDecision, PinLog
from phalanx.checkpoint.pruning import prune
from phalanx.checkpoint.report import checkpoint_rows
from phalanx.checkpoint.retention import Policy
from phalanx.cli.main import app
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, keys
from phalanx.lineage.events import EventLog, EventType, JobEvent, JobState
from phalanx.lineage.lease_book import EXPIRY_S
from phalanx.lineage.leases import Lease
from phalanx.objects import open_store


@pytest.fixture
def root(tmp_path):
    return open_store(f"file://{tmp_path}")


def a_job(root, **checkpoint):
    """A job of `phalanx run` with checkpoints at 2, 4 and 6, and a save under way."""
    store = root.within("projects/p/jobs/alone")
    spec = spec_of("alone", root.url, **checkpoint)
    Lineage(store).create_job(request_id="r", spec=spec, identity={}, identity_digest=IDENTITY)
    open_attempt(store)
    for step in (2, 4, 6):
        save(store, CheckpointRef(1, step), first_step=step - 1)
    write_parts(store, CheckpointRef(1, 8), 2, ranks=[1])
    return store


def run(*arguments):
    result = CliRunner().invoke(app, ["checkpoint", "prune", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_prune_by_hand_explains_and_then_removes(root):
    store = a_job(root, keep_latest_k=1)
    told = run(store.url, "--dry-run")
    assert [(each["ref"]["step"], each["removed"]) for each in told["removals"]] == [(2, False), (4, False)]
    assert [each["ref"]["step"] for each in told["kept"]] == [6, 8]
    done = run(store.url, "--grace", "0")
    assert [(each["ref"]["step"], each["removed"]) for each in done["removals"]] == [(2, True), (4, True)]
    assert Lineage(store).checkpoints() == (CheckpointRef(1, 6),) and restores(store, CheckpointRef(1, 6))
    rows = {row.step: row.why_dead for row in checkpoint_rows(store, dead=True)}
    assert rows == {
        2: "removed to save space; its step records stay",
        4: "removed to save space; its step records stay",
        6: None,
        8: "never committed: it has no manifest",
    }


@pytest.mark.parametrize("grace", ["-1", "nan", "inf", "1e300"])
def test_prune_by_hand_refuses_a_grace_that_no_one_waits(root, grace):
    store = a_job(root, keep_latest_k=1)
    before = sorted(info.key for info in store.list())
    assert CliRunner().invoke(app, ["checkpoint", "prune", store.url, "--grace", grace]).exit_code == 2
    assert sorted(info.key for info in store.list()) == before


def test_prune_by_hand_keeps_all_live_ones_where_the_job_sets_no_limit(root):
    store = a_job(root)
    assert run(store.url, "--grace", "0")["removals"] == []
    assert [each["ref"]["step"] for each in run(store.url, "--grace", "0", "--keep-latest", "1")["removals"]] == [2, 4]


def test_prune_by_hand_waits_its_grace_once_and_spares_what_was_needed_meanwhile(root):
    store = a_job(root)
    waited = []

    def attempt_starts(seconds):
        waited.append(seconds)
        open_attempt(store, avoid=[CheckpointRef(1, 6)])

    report = prune(store, Policy(keep_latest=1), dry_run=False, grace_s=0.001, sleep=attempt_starts)
    assert waited == [0.001]
    assert restores(store, CheckpointRef(1, 4)) and restores(store, CheckpointRef(1, 6))
    assert CheckpointRef(1, 4) in [decision.ref for decision in report.kept]


class Clock:
    """Monotonic seconds that pass while somebody sleeps."""

    def __init__(self, during=lambda: None):
        self.now, self.waited, self._during = 0.0, [], during

    def sleep(self, seconds):
        self.now += seconds
        self.waited.append(seconds)
        self._during()


@pytest.mark.parametrize(("grace_s", "waited"), [(1.0, [EXPIRY_S, 1.0]), (2 * EXPIRY_S, [2 * EXPIRY_S] * 2)])
@pytest.mark.parametrize("steps", [(2,), (2, 4)])
def test_prune_by_hand_waits_until_leases_of_killed_readers_have_ended(root, grace_s, waited, steps):
    store, clock = a_job(root), Clock()
    for step in steps:
        Lease(store, CheckpointRef(1, step), "export").renew()
    report = prune(
        store, Policy(keep_latest=1), dry_run=False, grace_s=grace_s, sleep=clock.sleep, clock=lambda: clock.now
    )
    assert clock.waited == waited
    assert [(each.ref.step, each.removed) for each in report.removals] == [(2, True), (4, True)]
    assert Lineage(store).checkpoints() == (CheckpointRef(1, 6),)
    assert not list(store.list(keys.LEASES)), "what is left of leases that ended goes too"


def test_prune_by_hand_spares_what_a_living_reader_has(root):
    store = a_job(root)
    living = Lease(store, CheckpointRef(1, 2), "export")
    living.renew()
    clock = Clock(during=living.renew)
    report = prune(store, Policy(keep_latest=1), dry_run=False, grace_s=1.0, sleep=clock.sleep, clock=lambda: clock.now)
    assert [each.ref.step for each in report.removals if each.removed] == [4]
    assert "in use: lease export" in next(each.why for each in report.kept if each.ref.step == 2)
    assert restores(store, CheckpointRef(1, 2))


def test_prune_by_hand_without_a_grace_waits_for_nobody(root):
    store, clock = a_job(root), Clock()
    Lease(store, CheckpointRef(1, 2), "export").renew()
    report = prune(store, Policy(keep_latest=1), dry_run=False, grace_s=0, sleep=clock.sleep, clock=lambda: clock.now)
    assert clock.waited == [] and [each.ref.step for each in report.removals if each.removed] == [4]


def test_prune_by_hand_of_a_submitted_job_needs_its_cluster_and_keeps_its_pins(root):
    job = register(root, "j", keep_latest_k=1)
    store = job.store()
    open_attempt(store)
    for step in (2, 4):
        save(store, CheckpointRef(1, step))
    EventLog(store).append(JobEvent(1, EventType.SUBMITTED, JobState.QUEUED, "now", "w"))
    with pytest.raises(PhalanxError, match="--cluster URL"):
        prune(store, Policy(keep_latest=1), dry_run=True)
    assert PinLog(root).create(job.name, PinDecision(1, "pin", 1, 2, "why not", "r", "me"))
    report = run(store.url, "--cluster", root.url, "--grace", "0", "--keep-latest", "1")
    assert report["removals"] == [] and report["kept"][0]["why"] == "pinned: why not"


def test_prune_by_hand_explains_best_and_speculative_ones_and_promotes_without_services(root):
    """Case 4: each deletion and each keep has its reason; a dry run stores no promotion, a prune does."""
    spec = {"keep_latest_k": 1, "keep_best_m": 1, "keep_best_by": "validation_loss", "speculative_healthy_steps": 3}
    store = root.within("projects/p/jobs/alone")
    Lineage(store).create_job(
        request_id="r", spec=spec_of("alone", root.url, **spec), identity={}, identity_digest=IDENTITY
    )
    open_attempt(store)
    for step in range(2, 13, 2):
        metrics = {"validation_loss": 10.0 - step if step in (2, 4) else 20.0}
        speculative = step in (6, 8, 10)
        save(store, CheckpointRef(1, step), first_step=step - 1, loss=2.0, speculative=speculative, metrics=metrics)
    told = run(store.url, "--dry-run")
    kept = {each["ref"]["step"]: each["why"] for each in told["kept"]}
    assert kept == {
        4: "among the best 1 by validation_loss (checkpoint.keep_best_m): 6",
        8: "the last speculative checkpoint that was found healthy",
        10: "the speculative checkpoint that is next to be found healthy",
        12: "the newest live checkpoint",
    }
    assert {each["ref"]["step"]: each["why"] for each in told["removals"]} == {
        2: "older than the newest 1 (checkpoint.keep_latest_k)",
        6: "speculative, and older than the last one that was found healthy, attempt 1 step 8",
    }
    promoted = keys.promoted(CheckpointRef(1, 8))
    assert not any(store.list(promoted))
    run(store.url, "--grace", "0")
    assert any(store.list(promoted)) and {ref.step for ref in Lineage(store).checkpoints()} == kept.keys()
