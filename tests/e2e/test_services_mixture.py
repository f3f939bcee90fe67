"""A submitted job of two sources: its weights are changed through the services, it is proved, and a fork reads on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.jobs import lineage_of, wait_until
from support.mixtures import mixed_job, second_corpus
from support.services import resized, services, wait_for_step

from phalanx.lineage.plan import MIXTURE_KIND

FAR = 1_000_000
BATCH = 8


@pytest.mark.long
@pytest.mark.timeout(480)
def test_submitted_mixture_changes_its_weights_while_it_runs_and_a_fork_of_it_reads_on(
    corpus: str, tmp_path: Path
) -> None:
    path = mixed_job(tmp_path, corpus, second_corpus(tmp_path / "code", corpus), steps=FAR)
    with services(tmp_path / "home", slots=4) as running, running.client() as client:
        running.told("job", "submit", path)
        wait_for_step(client, "tiny", 4)
        assert running.told("data", "mix", "tiny", "--set", "code=6", "--request-id", "one")["wish"] == 1
        assert running.told("data", "mix", "tiny", "--set", "code=6", "--request-id", "one")["wish"] == 1
        refused = running.cli("data", "mix", "tiny", "--set", "books=1", code=2)
        assert "one of the job's sources (code, web)" in refused.err and refused.err.count("\n") == 1
        wait_until(lambda: _changes(path), 60, "the wish is not granted")
        ((position, weights),) = _changes(path)
        assert weights == {"code": "6"} and position % BATCH == 0 and position >= 4 * BATCH
        wait_for_step(client, "tiny", position // BATCH + 4)
        running.told("job", "stop", "tiny")
        running.told("job", "wait", "tiny", code=1)
        shown = running.told("job", "show", "tiny")
        step, proof = shown["step"], running.told("data", "verify", "tiny")
        assert shown["epochs"] == pytest.approx(proof["epochs"])
        assert proof["ok"] and proof["steps"] == step and set(proof["epochs"]) == {"code", "web"}
        forked = running.told("job", "submit", "--from", "tiny", "--set", f"training.steps={step + 4}")
        ended = running.told("job", "wait", forked["name"])
        again = running.told("data", "verify", forked["name"].rpartition("/")[2])
        assert ended["step"] == step + 4 and ended["epochs"] == pytest.approx(again["epochs"])
        assert again["ok"] and again["windows"] == 4 * BATCH
        assert all(again["epochs"][name] >= proof["epochs"][name] for name in proof["epochs"])
    origin = lineage_of(resized(path, name="tiny-2")).read_job().origin
    assert origin is not None and origin.mixture is not None
    assert dict(origin.mixture.weights) == {"code": "6", "web": "3"} and origin.mixture.start == position


def _changes(path: Path) -> list[tuple[int, dict[str, str]]]:
    entries = lineage_of(path).all_journal_entries()
    return [(entry.position, dict(entry.payload["weights"])) for entry in entries if entry.kind == MIXTURE_KIND]
