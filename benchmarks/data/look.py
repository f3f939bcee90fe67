"""How long it takes to look at data: `phalanx data trace` by step, document and text, `show` and `verify`, each as the
whole command in a process of its own, imports included.

Run: python benchmarks/data/look.py JOB.toml, with a job file whose training split is prepared; prints one JSON line a
command: wall and processor seconds (medians), and the largest memory. Questions are drawn from the split itself; a text
that nobody says is the one that costs a whole reading.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import phalanx.stream
from phalanx.spec import load_job

NOBODY = "a sentence that no document of any corpus says, zzqqzz"


def measured(arguments: list[str]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and the largest resident bytes of one command."""
    command = [sys.executable, "-m", "phalanx.cli", *arguments]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def questions(job_file: Path, draw: random.Random) -> dict[str, list[list[str]]]:
    """Commands by name, a few of each."""
    job = load_job(job_file)
    assert job.data.train is not None
    documents = phalanx.stream.open(job.data.train)
    trace = ["data", "trace", "--job", str(job_file)]
    chosen = [documents[draw.randrange(len(documents))] for _ in range(5)]
    texts = [(document.text or "")[:60] for document in chosen]
    return {
        "trace --step": [[*trace, "--step", str(draw.randrange(1, job.training.steps))] for _ in range(5)],
        "trace --step --show": [[*trace, "--show", "--step", str(draw.randrange(1, job.training.steps))]],
        "trace --document": [[*trace, "--document", document.id] for document in chosen],
        "trace --text": [[*trace, "--text", text] for text in texts],
        "trace --text, in no document": [[*trace, "--text", NOBODY]] * 3,
        "show -n 3": [["data", "show", job.data.train, "-n", "3"]] * 3,
        "verify": [["data", "verify", job.data.train]] * 3,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    job = load_job(options.job)
    assert job.data.train is not None
    split = phalanx.stream.open(job.data.train).split
    facts = {"documents": split.num_documents, "tokens": split.num_tokens, "bytes": split.num_bytes}
    print(json.dumps({**facts, "load": os.getloadavg()[0], "cores": os.cpu_count()}), flush=True)
    for name, commands in questions(options.job, random.Random(options.seed)).items():
        walls, processor, memory = zip(*(measured(command) for command in commands), strict=True)
        figures = {
            "command": name,
            "runs": len(commands),
            "wall_s": round(statistics.median(walls), 2),
            "wall_s_least": round(min(walls), 2),
            "processor_s": round(statistics.median(processor), 2),
            "max_rss_mb": max(memory) >> 20,
        }
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
