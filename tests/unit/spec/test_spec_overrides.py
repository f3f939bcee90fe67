from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import SMALL, sample

from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec import load_job, parse_job
from phalanx.spec.job import plain
from phalanx.spec.source import apply_overrides
from phalanx.spec.toml import toml_text


@pytest.mark.parametrize(
    "override, section, key, value",
    [
        ("training.steps=7", "training", "steps", 7),
        ("optimizer.lr = 3e-4", "optimizer", "lr", 3e-4),
        ("compile.enable=true", "compile", "enable", True),
        ("parallel.schedule=1f1b", "parallel", "schedule", "1f1b"),
        ("job.name=2026", "job", "name", "2026"),
        ('job.name="a-b"', "job", "name", "a-b"),
        ("data.train=file:///srv/a=b", "data", "train", "file:///srv/a=b"),
        ("data.train=s3://b/x\ny = 3", "data", "train", "s3://b/x\ny = 3"),
    ],
)
def test_override_is_read_as_toml_else_as_text(override, section, key, value):
    assert apply_overrides({}, [override]) == {section: {key: value}}


def test_override_reaches_quoted_and_nested_tables_and_leaves_the_source_alone():
    raw = {"model": {"args": {"dim": 1}}}
    merged = apply_overrides(raw, ["model.args.dim=2", 'storage."my.bucket".region=here', "model.args.dim=3"])
    assert merged == {"model": {"args": {"dim": 3}}, "storage": {"my.bucket": {"region": "here"}}}
    assert raw == {"model": {"args": {"dim": 1}}}


@pytest.mark.parametrize("override", ["steps=3", "training.steps", "=3", "a b=3", "training..steps=3", ""])
def test_override_of_another_form_is_refused(override):
    with pytest.raises(PhalanxError, match=r"expected section\.key=value"):
        apply_overrides({}, [override])


def test_override_below_a_value_is_refused():
    with pytest.raises(PhalanxError, match=r"training\.steps is a value"):
        apply_overrides({"training": {"steps": 3}}, ["training.steps.x=1"])


def test_unknown_key_in_an_override_is_told_like_one_in_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(toml_text(SMALL))
    assert load_job(path, ["training.steps=9"]).training.steps == 9
    with pytest.raises(Problems, match=r"training\.stepz is 9: .* did you mean training\.steps\?"):
        load_job(path, ["training.stepz=9"])


def test_resolved_job_written_as_toml_is_the_same_job():
    presets = [sample(model={"preset": preset}) for preset in ("mixtral-8x7b", "llama3-tiny", "qwen3-tiny")]
    for job in (sample(), sample(storage={"a.b": {"region": 'say "x"'}}), *presets):
        again = parse_job(tomllib.loads(toml_text(plain(job))))
        assert again.identity() == job.identity() and plain(again) == plain(job)


_texts = st.text(st.characters(codec="utf-8"), max_size=5)
_values = st.recursive(
    st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_texts, _values, max_size=4))
def test_toml_text_of_any_tables_reads_back_equal(tables):
    assert tomllib.loads(toml_text(tables)) == tables
