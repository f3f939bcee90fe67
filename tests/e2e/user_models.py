"""Models of a user's own that misbehave at a given call: `[model] class = "user_models:..."`."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.core.digest import BytesLike
from phalanx.core.errors import PhalanxError
from phalanx.gang.context import PipeReport
from phalanx.objects.file import FileStore


class Bigram(nn.Module):
    """Logits from the current token alone; the least that a model can be.

    at_call, on_rank: where `misbehave` is called, counting the forwards of one process from 1. once: a file that is
    made then; where it is there already, nothing happens any more.
    """

    def __init__(self, vocab_size: int, at_call: int = 0, on_rank: int = 0, once: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)
        self.at_call, self.on_rank, self.once = at_call, on_rank, once
        self.num_calls = 0

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        self.num_calls += 1
        logits = self.head(self.embedding(tokens))
        if self.num_calls == self.at_call and int(os.environ["RANK"]) == self.on_rank and self._is_time():
            return self.misbehave(logits)
        return logits

    def _is_time(self) -> bool:
        if not self.once:
            return True
        path = Path(self.once)
        is_first = not path.exists()
        path.touch()
        return is_first

    def misbehave(self, logits: Tensor) -> Tensor:
        """What goes wrong."""
        return logits


class Grown(Bigram):
    """One parameter more once the file `once` is there: code that was changed between two runs."""

    def __init__(self, vocab_size: int, once: str) -> None:
        super().__init__(vocab_size, once=once)
        self.gain = nn.Parameter(torch.ones(16)) if Path(once).exists() else None

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        found = self.embedding(tokens)
        return self.head(found if self.gain is None else found * self.gain)


class Raises(Bigram):
    """Raises what no rank expects."""

    def misbehave(self, logits: Tensor) -> Tensor:
        raise ValueError("the sky fell on this rank")


class Unlike(Bigram):
    """Wider on the ranks behind `on_rank`."""

    def __init__(self, vocab_size: int, at_call: int = 0, on_rank: int = 0, once: str = "") -> None:
        super().__init__(vocab_size, at_call, on_rank, once)
        width = 16 if int(os.environ.get("RANK", "0")) <= on_rank else 24
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)


class Exits(Bigram):
    """Ends its process as if all were well."""

    def misbehave(self, logits: Tensor) -> Tensor:
        raise SystemExit(0)


class RaisesUserError(Bigram):
    """Raises what the user must change."""

    def misbehave(self, logits: Tensor) -> Tensor:
        raise PhalanxError("model.args.at_call", value=self.at_call, expected="0", remedy="set it to 0")


class Oversleeps(Bigram):
    """Never comes back."""

    def misbehave(self, logits: Tensor) -> Tensor:
        return self.doze_off(logits)

    def doze_off(self, logits: Tensor) -> Tensor:
        """The function whose name the stack must show."""
        threading.Event().wait(600)
        return logits


class CommitsSlowly(Bigram):
    """Rank 0 takes `at_call` seconds for the root of the checkpoint of step 1."""

    def __init__(self, vocab_size: int, at_call: int = 0) -> None:
        super().__init__(vocab_size)
        if os.environ.get("RANK") == "0":
            delay_put("s00000001/manifest.json", at_call)


class SavesSlowly(Bigram):
    """Rank 1 takes a minute for its part of the checkpoint of step `at_call`."""

    def __init__(self, vocab_size: int, at_call: int = 0) -> None:
        super().__init__(vocab_size)
        if os.environ.get("RANK") == "1":
            delay_put(f"s{at_call:08}/parts/00000001.json", 60.0)


def delay_put(ending: str, delay_s: float) -> None:
    """Makes the store of this process slow for one object; again, it changes nothing."""
    create = FileStore.create
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def late(store: FileStore, key: str, data: BytesLike) -> None:
        if key.endswith(ending):
            threading.Event().wait(delay_s)
        create(store, key, data)

    FileStore.create = late  # type: ignore[method-assign]


class Overflows(Bigram):
    """Its logits are not finite."""

    def misbehave(self, logits: Tensor) -> Tensor:
        return logits * torch.inf


class OverflowsFromThen(Bigram):
    """Its logits are not finite from that call on; with `once`, in one process alone."""

    def __init__(self, vocab_size: int, at_call: int, on_rank: int, once: str = "") -> None:
        super().__init__(vocab_size, at_call, on_rank, once)
        self.overflows = False

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        logits = super().forward(tokens, position_ids, document_ids)
        return logits * torch.inf if self.overflows else logits

    def misbehave(self, logits: Tensor) -> Tensor:
        self.overflows = True
        return logits


class TimesReports(Bigram):
    """Writes down how much of the time since its 10th forward this rank has spent on telling things: `times`-<rank>."""

    def __init__(self, vocab_size: int, times: str) -> None:
        super().__init__(vocab_size)
        self.times, self.began_s = times, 0.0

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        if self.num_calls == 10:
            self.began_s = time.monotonic()
            time_reports()
        logits = super().forward(tokens, position_ids, document_ids)
        if self.num_calls > 10:
            found = {"took_s": TOOK_S, "cpu_s": sum(CPU_S), "wall_s": time.monotonic() - self.began_s}
            Path(f"{self.times}-{os.environ['RANK']}").write_text(json.dumps(found))
        return logits


TOOK_S: list[float] = []
CPU_S: list[float] = []


def time_reports() -> None:
    """Takes the time of every report of this process from now on."""
    report = PipeReport.__call__

    @functools.wraps(report)
    def timed(self: PipeReport, kind: str, /, **fields: object) -> None:
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        report(self, kind, **fields)
        TOOK_S.append(time.perf_counter() - began_s)
        CPU_S.append(time.thread_time() - cpu_s)

    PipeReport.__call__ = timed  # type: ignore[method-assign]
