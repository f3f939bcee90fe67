from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.spec import load_job
from phalanx.spec.effects import without_effect
from phalanx.spec.reference import reference

ROOT = Path(__file__).resolve().parents[3]
WORLDS = {
    "demo": 8,
    "small-cpu": 1,
    "1b-8gpu": 8,
    "8b-64gpu": 64,
    "70b-512gpu": 512,
    "405b-4096gpu": 4096,
    "175b-1024gpu": 1024,
    "1t-8192gpu": 8192,
    "mixtral-64gpu": 64,
}


def test_reference_page_is_fresh():
    page = (ROOT / "docs" / "job-file.md").read_text(encoding="utf-8")
    assert page == reference(), "run `python -m phalanx.spec.reference`"


def test_reference_is_written_by_its_module_in_one_step(tmp_path):
    page = tmp_path / "page.md"
    subprocess.run([sys.executable, "-m", "phalanx.spec.reference", str(page)], check=True, timeout=60)
    assert page.read_text(encoding="utf-8") == reference() and list(tmp_path.iterdir()) == [page]


def test_examples_are_all_listed_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.toml")} == set(WORLDS)


@pytest.mark.parametrize("name, world", WORLDS.items())
def test_example_is_good_for_its_world_and_says_nothing_without_effect(name, world):
    job = load_job(ROOT / "examples" / f"{name}.toml", check_world=True)
    layout = job.layout(job.cluster.world_size)
    assert job.cluster.world_size == layout.world_size == world
    assert without_effect(job, layout) == ()


@pytest.mark.parametrize(
    "name, axes", [("405b-4096gpu", (8, 8, 64)), ("175b-1024gpu", (8, 16, 8)), ("demo", (2, 2, 2))]
)
def test_example_has_the_layout_that_its_name_promises(name, axes):
    layout = load_job(ROOT / "examples" / f"{name}.toml").layout(WORLDS[name])
    assert (layout.tp, layout.pp, layout.dp) == axes


_IMPORT = """
import sys, time
start = time.process_time()
from pydantic import BaseModel, Field, ConfigDict, model_validator
pydantic_s = time.process_time() - start
import phalanx.spec
own_s = time.process_time() - start - pydantic_s
print(pydantic_s, own_s, "torch" in sys.modules or "numpy" in sys.modules)
"""


def test_spec_import_is_light_beside_pydantic_and_free_of_torch():
    runs = [
        subprocess.run(
            [sys.executable, "-c", _IMPORT], check=True, timeout=60, capture_output=True, text=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert {heavy for _, _, heavy in runs} == {"False"}
    # pydantic's own import is the yardstick, so that a busy or slow machine doesn't decide (80 ms and 45 ms when idle).
    assert min(float(own) / float(base) for base, own, _ in runs) < 0.9
