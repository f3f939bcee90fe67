"""`optimizer.offload`: what it goes together with, and what it changes."""

from __future__ import annotations

import pytest
from spec_samples import sample, tables

from phalanx.core.errors import Problems
from phalanx.spec import parse_job
from phalanx.spec.effects import without_effect

PAGED = {"offload": "nvme", "offload_folder": "/local/pages"}


def optimizer(**keys):
    return {**tables()["optimizer"], **keys}


@pytest.mark.parametrize(
    ("keys", "more", "where", "expected"),
    [
        ({"offload": "nvme"}, {}, "optimizer.offload_folder", "a folder beside optimizer.offload"),
        (PAGED | {"offload_folder": ""}, {}, "optimizer.offload_folder", "text that is not empty"),
        (PAGED | {"offload_gib": 0.0}, {}, "optimizer.offload_gib", "at least 0.001"),
        (PAGED | {"offload_gib": 1e12}, {}, "optimizer.offload_gib", "at most"),
        (PAGED | {"offload": "disk"}, {}, "optimizer.offload", "nvme"),
        (PAGED | {"class": "pkg.module:Class"}, {}, "optimizer.offload", "none beside optimizer.class"),
        (PAGED | {"name": "muon"}, {}, "optimizer.offload", "none with the optimizer muon"),
        (PAGED, {"local_updates__steps": 4}, "optimizer.offload", "none with local updates"),
        (
            PAGED,
            {"gradient_compression": {"method": "powersgd"}},
            "optimizer.offload",
            "none with gradient compression",
        ),
        (PAGED, {"checkpoint__memory_interval": 3}, "checkpoint.memory_interval", "0 with optimizer state on a disk"),
    ],
)
def test_key_that_cannot_be_is_one_line_with_its_remedy(keys, more, where, expected):
    with pytest.raises(Problems) as caught:
        parse_job(tables(optimizer=optimizer(**keys), **more))
    found = [each for each in caught.value.problems if each.where == where and expected in each.expected]
    assert len(found) == 1 and found[0].remedy, caught.value


def test_state_on_disk_is_the_same_run():
    plain, paged = sample(), sample(optimizer=optimizer(**PAGED))
    assert paged.optimizer.offload_gib == 0.25
    assert plain.identity() == paged.identity() and plain.placement(2) == paged.placement(2)


def test_keys_of_a_disk_that_is_not_used_are_told():
    job = sample(data__held_out=None, optimizer=optimizer(offload_folder="/x", offload_gib=2.0))
    reason = 'has no effect, because optimizer.offload is "none"'
    assert without_effect(job, job.layout(2)) == (
        f"optimizer.offload_folder {reason}",
        f"optimizer.offload_gib {reason}",
    )
    paged = sample(data__held_out=None, optimizer=optimizer(**PAGED, offload_gib=2.0))
    assert without_effect(paged, paged.layout(2)) == ()
