"""What one rank's call is refused for is raised on every rank: the others would wait for it in torch's first message
until their deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from phalanx.core.errors import OutsideError, PhalanxError

_TEXT_BYTES: Final = 512

Made = TypeVar("Made")


def agreed(make: Callable[[], Made], group: dist.ProcessGroup | None) -> Made:
    """What `make` returns, once it has returned on all ranks of `group`, which all call this (None: this process is
    alone).

    Raises what it raised here; where it raised on other ranks alone, PhalanxError that names the first and what it
    says. OutsideError where a rank does not come within the group's deadline.
    """
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:  # noqa: BLE001  (raised below, once the others have heard of it)
        failure = error
    if group is not None:
        flag = torch.tensor([failure is not None], dtype=torch.int32)
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        except RuntimeError as error:
            raise failure or OutsideError(f"not every rank made this call within its deadline: {error}") from error
        if flag.item():
            _raise_heard(failure, group)
    if failure is not None:
        raise failure
    return made


def _raise_heard(failure: Exception | None, group: dist.ProcessGroup) -> None:
    """Tells all ranks what each failed with. Raises PhalanxError on those that did not fail themselves."""
    said = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    if failure is not None:
        data = str(failure).encode()[:_TEXT_BYTES] or b"?"
        said[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    heard = [torch.empty_like(said) for _ in range(dist.get_world_size(group))]
    dist.all_gather(heard, said, group=group)
    if failure is None:
        rank, text = next((rank, text) for rank, text in enumerate(heard) if text[0])
        raise PhalanxError(
            f"the call on rank {dist.get_process_group_ranks(group)[rank]}",
            value=text.numpy().tobytes().rstrip(b"\0").decode(errors="replace"),
            expected="one that is well on every rank, as it is on this one",
            remedy="correct it there; nothing was saved or loaded on any rank",
        )
