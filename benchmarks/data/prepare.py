"""The whole `data prepare` beside bare `tokenizers.encode_batch` on the same cores and documents, and its peak memory.

python benchmarks/data/prepare.py speed  [--mb 32] [--rounds 3] [--workers 2]
python benchmarks/data/prepare.py memory [--mb 50 200] [--workers 2] [--words] [--longest 200000]

The documents are Python sources found on this machine, held as JSON lines; the tokenizer (vocabulary 32,768) is trained
before on their first 8 MB and given to both sides. speed: rounds A B A B; `bare` has the texts in memory as strings and
keeps nothing, in batches of 1,024 documents; `prepare` reads, cleans, digests, tokenises, writes and fsyncs shards,
manifests and all. Processor seconds count the workers'. memory: peak of the summed proportional set sizes (PSS) of the
process (`phalanx data prepare`) and its workers; --longest leaves longer sources out, so that inputs of all sizes have
documents of the same lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.data.prepare import Local, PrepareSettings, prepare, source_of
from phalanx.data.prepare.tokenizer import train_tokenizer
from phalanx.objects import open_store

BATCH_DOCUMENTS, TOKENIZER_BYTES, SAMPLE_S = 1024, 8 << 20, 0.1


def sources() -> Iterator[str]:
    """Texts of all Python sources below the interpreter's library folders, in the order of their paths."""
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "/usr/lib/python3"):
        for file in sorted(Path(root).rglob("*.py")):
            try:
                text = file.read_bytes().decode()
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield text


def write_corpus(file: Path, num_bytes: int, longest: int | None = None) -> list[str]:
    """Writes JSON lines with so much text, without texts of more than `longest` characters; the texts."""
    texts, total = [], 0
    with file.open("w") as lines:
        for text in sources():
            if longest is not None and len(text) > longest:
                continue
            texts.append(text)
            lines.write(json.dumps({"text": text}) + "\n")
            total += len(text.encode())
            if total >= num_bytes:
                return texts
    raise SystemExit(f"this machine has {total / 1e6:.0f} MB of Python sources: ask for less")


def tokenizer_in(folder: Path) -> Path:
    """A tokenizer trained on the first sources."""
    sample, total = [], 0
    for text in sources():
        sample.append(text.encode())
        total += len(sample[-1])
        if total >= TOKENIZER_BYTES:
            break
    file = folder / "tokenizer.json"
    file.write_bytes(train_tokenizer(iter(sample), 32768, "<|endoftext|>"))
    return file


def word_tokenizer_in(folder: Path) -> Path:
    """A tokenizer of whole words, many times as fast as BPE: for memory, which it changes little."""
    words = Counter(word for text in islice(sources(), 500) for word in re.findall(r"\w+|[^\w\s]+", text))
    kept = ["<|endoftext|>", "[UNK]", *sorted(word for word, _ in words.most_common(30_000))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(kept)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def cpu_s() -> float:
    """Processor seconds of this process and of its children that ended."""
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    start_s, start_cpu_s = time.perf_counter(), cpu_s()
    act()
    return time.perf_counter() - start_s, cpu_s() - start_cpu_s


def bare(encode: Callable[[list[str]], object], texts: list[str]) -> None:
    """Encodes all texts and keeps nothing."""
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        encode(texts[first : first + BATCH_DOCUMENTS])


def speed(folder: Path, num_bytes: int, rounds: int, workers: int) -> None:
    """Prints a row a round, then the medians of the ratios."""
    texts = write_corpus(folder / "corpus.jsonl", num_bytes)
    given = tokenizer_in(folder)
    tokenizer = Tokenizer.from_file(str(given))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {megabytes:.1f} MB of text, {workers} workers, load {os.getloadavg()[0]:.1f}")
    print("| round | encode_batch s (cpu) | encode_batch_fast s (cpu) | prepare s (cpu) | MB/s of prepare |")
    print("|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"wall": [], "cpu": [], "wall, fast": [], "cpu, fast": []}
    for number in range(1, rounds + 1):
        plain = timed(lambda: bare(tokenizer.encode_batch, texts))
        whole = timed(lambda n=number: run(folder, folder / "corpus.jsonl", f"out{n}", given, workers))
        fast = timed(lambda: bare(tokenizer.encode_batch_fast, texts))
        row = " | ".join(f"{wall:.1f} ({cpu:.1f})" for wall, cpu in (plain, fast, whole))
        print(f"| {number} | {row} | {megabytes / whole[0]:.2f} |", flush=True)
        for kind, pair in (("wall", (plain[0], whole[0])), ("cpu", (plain[1], whole[1]))):
            ratios[kind].append(pair[0] / pair[1])
        ratios["wall, fast"].append(fast[0] / whole[0])
        ratios["cpu, fast"].append(fast[1] / whole[1])
    for kind, values in ratios.items():
        print(f"speed of prepare over bare ({kind}): median {statistics.median(values):.2f} of {sorted(values)}")


def run(folder: Path, corpus: Path, out: str, tokenizer: Path, workers: int) -> None:
    """One preparation."""
    store = open_store(f"file://{folder}/{out}")
    prepare(source_of(corpus), store, PrepareSettings(tokenizer=tokenizer), engine=Local(workers))


class PeakPss:
    """A context manager; peak_bytes: of a process and all below it while it was entered."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes, self._pid, self._stop = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakPss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        own = psutil.Process(self._pid)
        while not self._stop.wait(SAMPLE_S):
            total = 0
            for process in _tree(own):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory(folder: Path, sizes: list[int], workers: int, words: bool, longest: int | None) -> None:
    """Prints the peak of each size."""
    given = word_tokenizer_in(folder) if words else tokenizer_in(folder)
    print(f"{workers} workers, load {os.getloadavg()[0]:.1f}")
    print("| input | peak PSS of all processes | seconds |")
    print("|---|---|---|")
    for num_bytes in sizes:
        write_corpus(folder / "corpus.jsonl", num_bytes, longest)
        start_s = time.perf_counter()
        command = [sys.executable, "-m", "phalanx.cli", "data", "prepare", str(folder / "corpus.jsonl")]
        options = ["--out", f"file://{folder}/out{num_bytes}", "--tokenizer", str(given), "--workers", str(workers)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, *options], **quiet) as process, PeakPss(process.pid) as peak:
            process.wait()
        assert process.returncode == 0
        seconds = time.perf_counter() - start_s
        print(f"| {num_bytes / 1e6:.0f} MB | {peak.peak_bytes / 2**20:.0f} MiB | {seconds:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory"])
    parser.add_argument("--mb", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--words", action="store_true", help="memory with a tokenizer of whole words")
    parser.add_argument("--longest", type=int, help="memory: characters of the longest document")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        if given.what == "speed":
            speed(folder, (given.mb or [32])[0] * 10**6, given.rounds, given.workers)
        else:
            memory(folder, [mb * 10**6 for mb in given.mb or [50, 200]], given.workers, given.words, given.longest)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
