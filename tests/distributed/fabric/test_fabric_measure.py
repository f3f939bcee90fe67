"""Real ranks measure the network between them: what comes out, and who is named when it fails."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from phalanx.fabric.plan import BY_HAND, OPERATIONS, Plan, sizes_between
from phalanx.fabric.run import Hooks, Place, measure, num_phases
from phalanx.gang import ForkServer, Gang, StopSignals
from phalanx.gang.testing import run_gang
from phalanx.spec import Layout

pytestmark = pytest.mark.distributed

PLAN = Plan(
    Layout(dp_shard=2, tp=2), "cpu", sizes_between(256, 16384), (*OPERATIONS, *BY_HAND), deadline_s=30.0, budget_s=0.01
)
SHORT = replace(PLAN, operations=("all_reduce",), deadline_s=3.0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_reduce_by_hand_is_the_backends_own(fork_server: ForkServer, world_size: int) -> None:
    results = run_gang(fork_server, world_size, "fabric_entries:all_reduce_by_hand")
    for rank, result in enumerate(results):
        assert len(result["errors"]) == 4 and max(result["errors"].values()) < 1e-12
        assert result["received"] == (rank + 1) % world_size


def test_every_operation_over_every_axis_and_every_pair_is_measured(fork_server: ForkServer) -> None:
    phases: list[str] = []
    outcome, report = measure(PLAN, fork_server, Hooks(phases.append))
    assert outcome.ok and report is not None, outcome.first_cause
    found = {(each.axis, each.operation, each.num_bytes) for each in report.measurements}
    assert found == set(PLAN.measurements())
    groups = {axis: {each.slowest for each in report.measurements if each.axis == axis} for axis in ("dp_shard", "tp")}
    assert groups["dp_shard"] <= {(0, 2), (1, 3)} and groups["tp"] <= {(0, 1), (2, 3)}
    assert all(each.time_s > 0 and 5 <= each.iterations <= 50 for each in report.measurements)
    assert [each.ranks for each in report.pairs] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all(0 < each.latency_s < each.time_s for each in report.pairs)
    assert set(report.crossings) == {"dp_shard", "tp", "world"} and "2 ranks" in report.crossings["tp"].said
    assert report.slow_pairs == () and report.slow_ranks == (), report.said()
    assert len(set(phases)) == len(set(phases[: num_phases(PLAN)])) == num_phases(PLAN)


def test_rank_that_hangs_between_measurements_is_named(fork_server: ForkServer) -> None:
    outcome, report = measure(SHORT, fork_server, Hooks(), place=Place("fabric_entries:measure_and_hang"))
    cause = outcome.first_cause
    assert report is None and cause is not None and (cause.kind, cause.rank) == ("hang", 1)
    assert "in phase 'all_reduce over dp_shard, 4,096 bytes'" in cause.message


def test_rank_that_raises_is_named_with_its_reason(fork_server: ForkServer) -> None:
    outcome, report = measure(SHORT, fork_server, Hooks(), place=Place("fabric_entries:measure_and_raise"))
    cause = outcome.first_cause
    assert report is None and cause is not None and (cause.kind, cause.rank) == ("error", 1)
    assert cause.message == "RuntimeError: the adapter is on fire"


@pytest.mark.parametrize("signum, kind", [(signal.SIGKILL, "process_death"), (signal.SIGSTOP, "hang")])
def test_rank_that_is_killed_or_stopped_while_it_measures_is_named(
    fork_server: ForkServer, signum: signal.Signals, kind: str
) -> None:
    gangs: list[Gang] = []

    def strike(name: str) -> None:
        if name.startswith("all_reduce over tp"):
            os.kill(gangs[0].pids[2], signum)

    started_s = time.monotonic()
    outcome, report = measure(replace(SHORT, sizes=(256,)), fork_server, Hooks(strike, gangs.append))
    cause = outcome.first_cause
    assert report is None and cause is not None and (cause.kind, cause.rank) == (kind, 2)
    assert time.monotonic() - started_s < 30.0


def test_signal_ends_a_measurement_without_a_report(fork_server: ForkServer) -> None:
    with StopSignals() as stop:
        hooks = Hooks(lambda name: stop.request() if name.startswith("all_gather") else None)
        outcome, report = measure(PLAN, fork_server, hooks, stop=stop)
    assert outcome.state == "stopped" and report is None


def test_gpu_that_is_not_there_is_a_users_mistake(fork_server: ForkServer) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome, report = measure(replace(SHORT, device="cuda"), fork_server, Hooks())
    cause = outcome.first_cause
    assert report is None and cause is not None and cause.kind == "user_error"
    assert "expected a GPU for each rank of this host, where torch finds 0" in cause.message


def test_network_of_the_job_file_is_looked_at_before_the_gpu(fork_server: ForkServer) -> None:
    plan = replace(SHORT, device="cuda", network={"interfaces": "=nowhere0"})
    outcome, _ = measure(plan, fork_server, Hooks())
    assert outcome.first_cause is not None and outcome.first_cause.kind == "user_error"
    assert outcome.first_cause.message.startswith("cluster.network.interfaces is '=nowhere0': expected one of")
