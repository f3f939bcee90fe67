"""The first cause: what a rank died of is weighed before it is timed."""

import itertools
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.gang.cause import Cause, first_cause, first_of_hosts
from phalanx.gang.order import Event, RankExit
from phalanx.gang.rank import describe

GLOO_TEXTS = [
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242",
    "Connection reset by peer",
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation",
    "Application timeout caused pair closure",
    "Gloo connectFullMesh failed with SO_ERROR: Connection refused",
]


class DistBackendError(RuntimeError):
    """Stands for torch's class of this name: causes are told by the names of classes."""


class OutOfMemoryError(RuntimeError):
    """Stands for torch's class of this name."""


def raised(error: BaseException, source: BaseException | None = None) -> BaseException:
    try:
        raise error from source
    except BaseException as caught:  # noqa: BLE001
        return caught


def error_event(rank, error, at_s=1.0):
    return Event(rank, "error", describe(error), at_s)


def death(rank, *, signum=None, code=None, ours=False, oom=0, at_s=1.0):
    return RankExit(rank, 100 + rank, code, signum, ours, oom, at_s)


@pytest.mark.parametrize("text", GLOO_TEXTS)
def test_first_cause_peer_errors_reported_earlier_lose_against_the_real_error(text):
    events = [error_event(0, RuntimeError(text), 1.0), error_event(2, ValueError("mine"), 2.0)]
    cause = first_cause(events, [death(0, code=1), death(2, code=1)])
    assert (cause.kind, cause.rank, cause.message) == ("error", 2, "ValueError: mine")


def test_first_cause_peer_error_reported_earlier_loses_against_a_signal_death():
    cause = first_cause([error_event(0, DistBackendError("x"), 1.0)], [death(3, signum=9, at_s=1.5), death(0, code=1)])
    assert (cause.kind, cause.rank, cause.signal) == ("process_death", 3, signal.SIGKILL)
    assert "SIGKILL" in str(cause)


def test_first_cause_abort_of_a_peer_loses_against_a_later_signal_death():
    cause = first_cause([], [death(1, signum=6, at_s=1.0), death(4, signum=11, at_s=1.1)])
    assert (cause.rank, cause.signal) == (4, signal.SIGSEGV)


def test_first_cause_abort_wins_over_peer_errors():
    cause = first_cause([error_event(0, RuntimeError(GLOO_TEXTS[0]), 0.5)], [death(1, signum=6, at_s=1.0)])
    assert (cause.kind, cause.rank) == ("process_death", 1)


def test_first_cause_error_that_came_from_a_lost_peer_is_a_follow_up():
    wrapped = raised(RuntimeError("stage 1 failed"), raised(RuntimeError(GLOO_TEXTS[0])))
    cause = first_cause([error_event(0, wrapped, 1.0), error_event(1, KeyError("k"), 2.0)], [])
    assert (cause.kind, cause.rank) == ("error", 1)


def test_first_cause_only_lost_peers_names_the_earliest():
    events = [error_event(1, RuntimeError(GLOO_TEXTS[1]), 2.0), error_event(0, RuntimeError(GLOO_TEXTS[0]), 1.0)]
    cause = first_cause(events, [])
    assert (cause.kind, cause.rank) == ("lost_peer", 0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PhalanxError("[a] b", expected="c", remedy="d"), "user_error"),
        (OutsideError("the store is gone"), "storage"),
        (raised(OutsideError("the store is gone"), ConnectionResetError("Connection reset by peer")), "storage"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out_of_memory"),
        (OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (ConnectionResetError("Connection reset by peer"), "error"),
        (raised(RuntimeError("step failed"), OutOfMemoryError("CUDA out of memory")), "out_of_memory"),
    ],
)
def test_first_cause_kind_follows_from_the_error(error, kind):
    assert first_cause([error_event(0, error)], []).kind == kind


def test_first_cause_user_error_keeps_its_one_line():
    error = PhalanxError("[a] b", value=3, expected="c", remedy="d")
    assert first_cause([error_event(0, error)], [death(0, code=2)]).message == str(error)


def test_first_cause_sigkill_with_oom_evidence_is_out_of_memory():
    assert first_cause([], [death(0, signum=9, oom=1)]).kind == "out_of_memory"


def test_first_cause_exit_without_a_word_names_the_code():
    cause = first_cause([], [death(2, code=7)])
    assert (cause.kind, cause.rank, cause.exit_code) == ("process_death", 2, 7)


def test_first_cause_exit_with_zero_of_a_rank_that_did_not_return_is_a_death():
    exits = [death(0, code=0), death(1, code=0), death(2, signum=15, ours=True)]
    assert first_cause([], exits, returned={0, 1}) is None
    cause = first_cause([error_event(0, RuntimeError(GLOO_TEXTS[0]))], exits, returned={0})
    assert (cause.kind, cause.rank, cause.exit_code) == ("process_death", 1, 0)


def test_first_cause_ends_that_we_asked_for_are_none():
    assert first_cause([], [death(0, code=0), death(1, signum=15, ours=True), death(2, signum=9, ours=True)]) is None


observations = st.lists(
    st.tuples(st.sampled_from(["own", "abort", "peer", "ours", "fine"]), st.floats(0, 10)), min_size=1, max_size=6
)


@given(observations)
def test_first_cause_any_order_of_observation_names_the_same(observed):
    events, exits = [], []
    for rank, (what, at_s) in enumerate(observed):
        match what:
            case "own":
                events.append(error_event(rank, ValueError("x"), at_s))
            case "peer":
                events.append(error_event(rank, RuntimeError(GLOO_TEXTS[0]), at_s))
            case "abort":
                exits.append(death(rank, signum=6, at_s=at_s))
            case "ours":
                exits.append(death(rank, signum=15, ours=True, at_s=at_s))
            case _:
                exits.append(death(rank, code=0, at_s=at_s))
    weights = ["own", "abort", "peer"]
    bad = [(weights.index(what), at_s, rank) for rank, (what, at_s) in enumerate(observed) if what in weights]
    cause = first_cause(events, exits)
    if not bad:
        assert cause is None
        return
    assert (weights.index(observed[cause.rank][0]), observed[cause.rank][1]) == min(bad)[:2]
    for shuffled in itertools.islice(itertools.permutations(events), 6):
        other = first_cause(shuffled, reversed(exits))
        assert observed[other.rank] == observed[cause.rank]


OWN = Cause("process_death", 3, "killed by SIGKILL", signal=9)
ABORT = Cause("process_death", 5, "killed by SIGABRT", signal=6)
PEER = Cause("lost_peer", 0, "Connection closed by peer")
HANG_IN_COLLECTIVE = Cause("hang", 1, "in phase 'step'", is_waiting=True)
HANG = Cause("hang", 6, "in phase 'step'")


@pytest.mark.parametrize(
    ("causes", "first"),
    [
        ([PEER, None, OWN], OWN),
        ([PEER, ABORT, None], ABORT),
        ([ABORT, PEER, OWN], OWN),
        ([HANG_IN_COLLECTIVE, HANG], HANG),
        ([HANG, OWN], HANG),
        ([PEER, HANG_IN_COLLECTIVE], PEER),
        ([Cause("interrupted", None, "ended on request"), PEER], Cause("interrupted", None, "ended on request")),
        ([None, None], None),
        ([], None),
    ],
)
def test_first_of_hosts_weight_decides_then_arrival(causes, first):
    assert first_of_hosts(causes) == first


@given(st.lists(st.sampled_from([OWN, ABORT, PEER, HANG, HANG_IN_COLLECTIVE, None])))
def test_first_of_hosts_nobody_weighs_more_and_nobody_as_heavy_came_before(causes):
    first = first_of_hosts(causes)
    told = [cause for cause in causes if cause is not None]
    if first is None:
        assert not told
        return
    assert first.weight == min(cause.weight for cause in told)
    assert first == next(cause for cause in told if cause.weight == first.weight)


@pytest.mark.parametrize(
    ("name", "base", "kind"), [("Superseded", PhalanxError, "superseded"), ("DamagedShard", OutsideError, "bad_shard")]
)
def test_first_cause_error_of_a_class_that_says_what_it_is_has_that_kind(name, base, kind):
    error = type(name, (base,), {"__init__": lambda self: Exception.__init__(self, "as it says")})()
    assert first_cause([error_event(1, error)], [death(1, code=1)]).kind == kind
    caught = raised(RuntimeError("while reading"), error)
    assert first_cause([error_event(1, caught)], [death(1, code=1)]).kind == kind
