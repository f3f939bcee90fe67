"""Real text, prepared, read by 1, 3, 4 and 8 ranks with kills and changes of their number in between: each token of an
epoch exactly once, by the records and by a second reading.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from support.jobs import run_cli
from support.reading_ranks import ReadingGang

from phalanx.data.job_proof import prove_job
from phalanx.lineage import Lineage
from phalanx.spec import parse_job
from phalanx.stream import open_split
from phalanx.stream.members import ShardIndices
from phalanx.trainer.places import job_store, store_at

WORLDS = (1, 4, 3, 8, 3, 1, 8, 4)


def uncovered_and_repeated(job) -> tuple[int, int]:
    """Tokens of the first epoch that no live record has among its inputs, and those that several have."""
    split = open_split(store_at(job, job.data.train))
    seq_len, starts = job.training.seq_len, np.concatenate([[0], np.cumsum(split.shard_tokens)])
    seen = np.zeros(split.num_tokens, np.uint8)
    members = {}
    store = store_at(job, job.data.train)
    index_of = ShardIndices(store, split, capacity=split.num_shards)
    for rows, _ in Lineage(job_store(job)).records.live():
        before = np.cumsum(rows.length) - rows.length
        first_of_window = before[np.searchsorted(rows.segment_window, rows.segment_window)]
        place = rows.position[rows.segment_window] * seq_len + before - first_of_window
        for row in np.flatnonzero(place < split.num_tokens):
            shard, member = int(rows.shard[row]), int(rows.member[row])
            if shard not in members:
                tokens = index_of(shard).member_tokens()
                members[shard] = np.cumsum(tokens) - tokens
            begin = starts[shard] + members[shard][member] + rows.offset[row]
            seen[begin : begin + rows.length[row]] += 1
    return int((seen == 0).sum()), int((seen > 1).sum())


def read_and_prove(folder: Path, inputs: list[str], *, max_bytes: int, vocab: int, shard_tokens: int, seq_len: int):
    """Prepares, reads an epoch and a little more, and proves it; what was read."""
    out = f"file://{folder}/corpus"
    numbers = {"--vocab-size": vocab, "--max-bytes": max_bytes, "--shard-tokens": shard_tokens}
    options = [str(word) for pair in numbers.items() for word in pair]
    finished = run_cli(["data", "prepare", *inputs, "--out", out, *options, "--json"], timeout_s=1500)
    assert finished.code == 0, finished.err
    prepared = json.loads(finished.out)
    batch, tokens = 24, prepared["train"]["num_tokens"]
    steps = -(-tokens // (batch * seq_len)) + 3
    tables = {
        "job": {"name": "union", "storage": f"file://{folder}/runs"},
        "model": {"preset": "tiny"},
        "data": {"train": f"{out}/train"},
        "training": {"seq_len": seq_len, "steps": steps, "global_batch_size": batch},
        "optimizer": {"lr": 1e-3},
        "parallel": {"local_batch_size": 2},
    }
    job = parse_job(tables)
    (folder / "job.json").write_text(json.dumps(tables))
    every = max(1, steps // 40)
    gang = ReadingGang(job, folder / "job.json", every, deadline_s=1500)
    for number, world in enumerate(WORLDS):
        until = steps * (number + 1) // len(WORLDS)
        if number % 2:
            gang.run(world, until, kill_at=gang.step + max(1, (until - gang.step) // 2), victim=world // 2)
        gang.run(world, until)
    proof = prove_job(job)
    assert (proof.ok, proof.samples_missing, proof.samples_repeated) == (True, 0, 0), proof.mismatches
    assert proof.windows == steps * batch and proof.bytes_compared > tokens
    assert uncovered_and_repeated(job) == (0, 0)
    assert gang.kills == len(WORLDS) // 2 and proof.steps_redone > 0
    return prepared


@pytest.mark.timeout(300)
def test_union_of_ranks_over_kills_and_changes_of_world_is_an_epoch_exactly(tmp_path):
    """Cases 1, 3 and 4: ranks are processes, shards of uneven size; each rank ends each of its steps, none waits."""
    library = Path(sysconfig.get_path("stdlib"))
    inputs = [str(library / "email")]
    read_and_prove(tmp_path, inputs, max_bytes=4_000_000, vocab=600, shard_tokens=1 << 16, seq_len=256)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_union_of_ranks_over_200_megabytes_of_real_text_is_an_epoch_exactly(tmp_path):
    sources = [f"{sysconfig.get_path(name)}/**/*.py" for name in ("purelib", "stdlib")]
    documentation = [each for each in ("/usr/share/doc",) if Path(each).is_dir()]
    prepared = read_and_prove(
        tmp_path,
        [*sources, *documentation],
        max_bytes=230_000_000,
        vocab=8192,
        shard_tokens=1 << 22,
        seq_len=1024,
    )
    assert prepared["bytes_read"] >= 200_000_000
