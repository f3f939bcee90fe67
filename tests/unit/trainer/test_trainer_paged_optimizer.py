"""AdamW with its state in pages of a file: bit-equal to the same in memory, whatever a page holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.core.box import Box, HeldTensor, whole
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.spec.training import LEAST_OFFLOAD_GIB
from phalanx.trainer import optimizer as optimizers
from phalanx.trainer.optimizer import Optimizer
from phalanx.trainer.paged_optimizer import PagedOptimizer

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")
SHAPES = {"embedding": (1003, 517), "norm": (517,), "weight": (64, 1999), "bias": (7,), "scale": (), "gone": (0, 3)}


def job_of(folder: Path, implementation: str = "fused", max_norm: float = 1.0, **more: object) -> Job:
    optimizer = {"lr": 0.1, "weight_decay": 0.1, "implementation": implementation}
    return parse_job(
        {
            "job": {"name": "paged", "storage": "memory://paged"},
            "model": {"preset": "tiny"},
            "data": {"train": "memory://paged/train"},
            "training": {"seq_len": 8, "steps": 1, "global_batch_size": 1, "max_norm": max_norm},
            "optimizer": {**optimizer, "offload_folder": str(folder), "offload_gib": LEAST_OFFLOAD_GIB, **more},
        }
    )


def paged_job(folder: Path, implementation: str = "fused", max_norm: float = 1.0) -> Job:
    return job_of(folder, implementation, max_norm, offload="nvme")


def optimizer_of(job: Job, held: list[HeldTensor]) -> Optimizer:
    """The trainer's choice, without other replicas."""
    return optimizers.optimizer_of(job, held, ReplicaLink(None))


def held_tensors() -> list[HeldTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        HeldTensor(name, shape, whole(shape), torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    ]


def gradients_of(step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    drawn = [torch.randn(shape, generator=generator) * 3 for shape in SHAPES.values()]
    return [None if name == "bias" else each for name, each in zip(SHAPES, drawn, strict=True)]


def states_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The moments, wherever they lie."""
    found = {}
    for held in optimizer.state():
        if held.paged is None:
            found[held.name] = held.local
            continue
        held.paged.pages.pin()
        data = b"".join(bytes(piece) for piece in held.paged.pieces(0, held.box.num_elements))
        held.paged.pages.release()
        flat = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
        found[held.name] = flat.view(held.box.shape)
    return found


def update(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        gradients = gradients_of(step)
        norm = float(sum(float(each.square().sum()) for each in gradients if each is not None) ** 0.5)
        optimizer.update(gradients, norm, 1.0 / (1 + step))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_updates_are_bit_equal_to_those_in_memory(
    tmp_path: Path, implementation: str, max_norm: float, num_threads: int
) -> None:
    ours, theirs = held_tensors(), held_tensors()
    in_memory = optimizer_of(job_of(tmp_path, implementation, max_norm), theirs)
    paged = optimizer_of(paged_job(tmp_path, implementation, max_norm), ours)
    assert isinstance(paged, PagedOptimizer) and len(paged.pages.layout.pages) > 10
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        update(in_memory, range(4))
        update(paged, range(4))
    finally:
        torch.set_num_threads(before)
    assert paged.num_updates == in_memory.num_updates == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.local, other.local), mine.name
    found, expected = states_of(paged), states_of(in_memory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_state_of_memory_goes_on_in_pages_and_back_bit_for_bit(tmp_path: Path) -> None:
    """As a run does whose job file gains the key, and loses it again."""
    straight, moved = held_tensors(), held_tensors()
    optimizer = optimizer_of(job_of(tmp_path), straight)
    update(optimizer, range(6))
    jobs = [job_of(tmp_path), paged_job(tmp_path), job_of(tmp_path)]
    state: dict[str, torch.Tensor] = {}
    for number, job in enumerate(jobs):
        part = optimizer_of(job, moved)
        for held in part.state() if state else []:
            if held.paged is None:
                held.local.copy_(state[held.name])
            else:
                held.paged.write(0, state[held.name])
        part.resume({"num_updates": 2 * number})
        update(part, range(2 * number, 2 * number + 2))
        state = states_of(part)
    assert all(torch.equal(a.local, b.local) for a, b in zip(straight, moved, strict=True))


def test_state_has_the_names_boxes_and_replicas_of_the_one_in_memory_and_takes_no_memory(tmp_path: Path) -> None:
    box = Box((3, 0), (5, 4))
    held = [HeldTensor("a", (9, 4), box, torch.ones(5, 4), replica=1, num_replicas=2)]
    found, expected = optimizer_of(paged_job(tmp_path), held).state(), optimizer_of(job_of(tmp_path), held).state()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.name, ours.global_shape, ours.box, ours.replica, ours.num_replicas) == (
            theirs.name,
            theirs.global_shape,
            theirs.box,
            theirs.replica,
            theirs.num_replicas,
        )
        assert ours.local.is_meta and ours.local.shape == theirs.local.shape and ours.local.dtype == theirs.local.dtype


def test_rank_without_any_element_updates_nothing_and_counts(tmp_path: Path) -> None:
    optimizer = optimizer_of(paged_job(tmp_path), [HeldTensor("a", (2, 3), Box((2, 0), (0, 3)), torch.ones(0, 3))])
    optimizer.update([torch.ones(0, 3)], 2.0, 1.0)
    assert optimizer.num_updates == 1


def test_disk_without_space_for_the_state_ends_the_rank_in_one_line(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    elements = free.f_bavail * free.f_frsize // 4  # its state alone takes four times what is free
    huge = torch.zeros(1).expand(elements)
    with pytest.raises(OutsideError, match="No space left on device") as found:
        optimizer_of(paged_job(tmp_path), [HeldTensor("a", (elements,), whole((elements,)), huge)])
    assert str(tmp_path) in str(found.value) and "\n" not in str(found.value)


def test_folder_that_cannot_be_used_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PhalanxError, match=r"optimizer\.offload_folder"):
        optimizer_of(paged_job(tmp_path / "file"), held_tensors())


MIB = 1 << 20
BUDGET_BYTES, NUM_PARAMETERS = 6 * MIB, 8 * MIB  # 64 MiB of state, more than 10 times the budget


def growth_of(folder: Path, place: str) -> dict[str, int]:
    """What `paged_memory.py` measures."""
    script = Path(__file__).with_name("paged_memory.py")
    command = [sys.executable, str(script), str(folder), place, str(BUDGET_BYTES), str(NUM_PARAMETERS)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environ)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_ten_times_more_state_than_the_budget_trains_and_is_saved_within_it(tmp_path: Path) -> None:
    state_bytes = 8 * NUM_PARAMETERS
    assert state_bytes >= 10 * BUDGET_BYTES
    paged = growth_of(tmp_path / "paged", "nvme")
    in_memory = growth_of(tmp_path / "memory", "none")
    assert in_memory["update"] >= state_bytes, "what is measured is there to be seen"
    assert paged["update"] <= BUDGET_BYTES + 4 * MIB
    assert in_memory["save"] >= 0.9 * state_bytes
    assert paged["save"] <= BUDGET_BYTES + 8 * MIB
    assert paged["restore"] < state_bytes
