"""Logs of ranks are bounded on their node: the oldest attempts go, never one that lives, and a reader is told."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.agent import Agent
from phalanx.agent.log_bound import REMOVED, bound_logs, refuse_removed
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc.config import Security, ServiceConfig


def _attempt(root, job, attempt, num_bytes, at_s):
    folder = root / "p" / job / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    for rank in range(2):
        log = folder / f"rank{rank}.log"
        log.write_bytes(b"x" * (num_bytes // 2))
        os.utime(log, (at_s, at_s))
    return folder


def _taken(root):
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def test_attempts_that_ended_first_go_until_the_rest_fits(tmp_path):
    newest = _attempt(tmp_path, "a", 2, 100, 300)
    oldest = _attempt(tmp_path, "a", 1, 100, 100)
    middle = _attempt(tmp_path, "b", 1, 100, 200)
    assert bound_logs(tmp_path, 300, ()) == ()
    assert bound_logs(tmp_path, 199, ()) == (oldest, middle)
    assert _taken(tmp_path) == 100
    refuse_removed(newest, 2)
    with pytest.raises(OutsideError, match=r"attempt 1 had to go.*max_log_bytes.*raise it"):
        refuse_removed(oldest, 1)
    assert bound_logs(tmp_path, 199, ()) == ()


def test_logs_of_who_lives_count_and_stay(tmp_path):
    living = _attempt(tmp_path, "a", 1, 1000, 100)
    ended = _attempt(tmp_path, "b", 1, 10, 200)
    assert bound_logs(tmp_path, 100, {living}) == (ended,)
    assert (living / "rank0.log").stat().st_size == 500
    refuse_removed(living, 1)


def test_removal_that_was_cut_off_goes_on_the_next_time(tmp_path):
    folder = _attempt(tmp_path, "a", 1, 100, 100)
    (folder / REMOVED).touch()
    (folder / "rank0.log").unlink()
    assert bound_logs(tmp_path, 10, ()) == (folder,)
    assert [file.name for file in folder.iterdir()] == [REMOVED]


def test_link_that_leads_out_loses_nothing_behind_it(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"y" * 50)
    folder = _attempt(tmp_path / "ranks", "a", 1, 100, 100)
    (folder / "link").symlink_to(kept)
    assert bound_logs(tmp_path / "ranks", 0, ()) == (folder,)
    assert (kept / "file").read_bytes() == b"y" * 50


def test_logs_that_cannot_be_removed_are_told_and_the_next_go(tmp_path, caplog, monkeypatch):
    stuck, other = _attempt(tmp_path, "a", 1, 100, 100), _attempt(tmp_path, "b", 1, 100, 200)
    touch = type(stuck).touch

    def refused(path, *args, **kwargs):
        if path.parent == stuck:
            raise PermissionError(13, "Permission denied", str(path))
        touch(path, *args, **kwargs)

    monkeypatch.setattr(type(stuck), "touch", refused)
    assert bound_logs(tmp_path, 100, ()) == (other,)
    assert str(stuck) in caplog.text
    assert "Permission denied" in caplog.text


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=8), st.integers(0, 400))
def test_what_is_left_fits_or_lives(tmp_path_factory, attempts, max_bytes):
    root = tmp_path_factory.mktemp("logs")
    folders = [
        (_attempt(root, f"j{number}", 1, 2 * half, at_s), at_s, lives)
        for number, (half, at_s, lives) in enumerate(attempts)
    ]
    gone = bound_logs(root, max_bytes, {folder for folder, _, lives in folders if lives})
    assert not any(lives for folder, _, lives in folders if folder in gone)
    kept_and_ended = [at_s for folder, at_s, lives in folders if not lives and folder not in gone and _taken(folder)]
    assert _taken(root) <= max_bytes or not kept_and_ended
    assert all(at_s <= kept for folder, at_s, _ in folders if folder in gone for kept in kept_and_ended)


def test_negative_bound_is_refused_before_anything_is_made(tmp_path):
    state_dir = tmp_path / "state"
    files = Security(*(tmp_path / name for name in ("ca", "cert", "key", "token.pub")))
    config = ServiceConfig("agent", "127.0.0.1:0", files, options={"state_dir": str(state_dir), "max_log_bytes": -1})
    with pytest.raises(PhalanxError, match=r"options.max_log_bytes.*-1.*expected a number of bytes, or 0"):
        Agent(config)
    assert not state_dir.exists()
