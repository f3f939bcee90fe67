"""Published measurements as the planner reads them; the rows here are made up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from benchmarks.planner.__main__ import main
from benchmarks.planner.fit import Linear, cross_validated, folds_by_source
from benchmarks.planner.models import model_shape
from benchmarks.planner.predict import predict
from benchmarks.planner.report import BEGIN, END, markdown, scatter, update
from benchmarks.planner.rows import network_gbps, read_row
from benchmarks.planner.score import score, score_ranking
from benchmarks.planner.truth import scored

from phalanx.core.errors import PhalanxError
from phalanx.planner.time import step_time

LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256, "seq": 8192}


def row(name="made/up", **changes):
    made = {
        "id": name,
        "source": name.split("/")[0],
        "category": "step_time",
        "tier": "A",
        "model": LLAMA,
        "cluster": {"gpu": "H100-SXM-80GB", "per_node": 8, "count": 64, "interconnect": "8x400Gb per node"},
        "parallel": {
            "dp": 32,
            "tp": 2,
            "pp": 1,
            "micro_batch": 1,
            "global_batch": 128,
            "recompute": "none",
            "zero": 1,
            "precision": "bf16",
            "seq_parallel": True,
        },
        "software": {"stack": "megatron-core", "year": 2024},
    }
    for part, more in changes.items():
        made[part] = {**made[part], **more} if isinstance(more, dict) and part in made else more
    return made


def measured(name, times, **changes):
    """A row whose step took `times` as long as the planner says."""
    made = row(name, **changes)
    seconds = step_time(read_row(made).config).total_s * times
    return {**made, "measured": {"step_time_s": seconds, "mem_gb": 40.0}}


@pytest.mark.parametrize(
    ("text", "per_node", "gbps"),
    [
        ("8x400Gb NDR per node", 8, 50),
        ("4x100Gb fabric per node", 8, 6.25),
        ("1600Gb RoCE per node", 8, 25),
        ("400Gb RDMA per GPU", 8, 50),
        ("400Gb RoCE, 3 layers", 8, 50),
        ("fat-tree", 8, None),
        (None, 8, None),
    ],
)
def test_network_of_one_gpu_is_read_from_words(text, per_node, gbps):
    assert network_gbps(text, per_node) == gbps


def test_complete_row_is_read_as_it_is_with_nothing_assumed():
    read = read_row(row())
    assert read.assumptions == []
    assert (read.config.layout.dp, read.config.layout.tp, read.config.run.zero) == (32, 2, 1)
    assert read.config.model.gated_ffn and read.config.cluster.network_gbps == 50


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        ("cluster", "interconnect", "network not given"),
        ("parallel", "dp", "dp not given: 32"),
        ("parallel", "recompute", "recompute not given"),
        ("parallel", "precision", "precision not given: bf16"),
        ("parallel", "micro_batch", "micro-batch not given"),
        ("parallel", "global_batch", "global batch not given"),
        ("parallel", "zero", "ZeRO stage not given"),
        ("parallel", "seq_parallel", "sequence parallelism not given"),
        ("software", "year", "year not given"),
        ("model", "vocab", "vocabulary not given"),
        ("model", "seq", "sequence length not given"),
    ],
)
def test_what_a_row_leaves_open_is_assumed_and_said(part, field, words):
    made = row()
    made[part] = {name: value for name, value in made[part].items() if name != field}
    (answer,) = predict([made])
    assert answer["step_time_s"] > 0 and any(words in each for each in answer["assumptions"])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("FP8-CS", "fp8-current"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("fp8_rowwise", "fp8-rowwise"),
        ("amp_bf16", "bf16"),
    ],
)
def test_precisions_are_known_by_the_names_that_stacks_use(written, meant):
    assert read_row(row(cluster={"gpu": "GB200"}, parallel={"precision": written})).config.run.precision == meant


def test_shape_follows_the_number_of_parameters_where_it_is_open():
    said = []
    shape = model_shape({"params": 175e9}, said)
    assert 0.9 < 12 * shape.n_layers * shape.dim**2 / 175e9 < 1.1 and "shape not given" in said[0]
    assert model_shape({**LLAMA, "params": 8.03e9}, []).gated_ffn
    assert not model_shape({"layers": 32, "hidden": 4096, "heads": 32, "ffn": 16_384, "vocab": 50_368}, []).gated_ffn


def test_row_that_cannot_be_answered_says_why_and_is_not_skipped():
    wrong = [row("a", cluster={"gpu": "Abacus"}), row("b", cluster={"count": 65}), row("c")]
    first, second, third = predict(wrong)
    assert "H100-80" in first["error"] and "64 ranks" in second["error"] and "error" not in third
    assert [first["id"], second["id"], third["id"]] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("model", {"layers": -1}),
        ("model", {"hidden": 1e30}),
        ("model", {"vocab": 10**400}),
        ("model", {"params": math.inf}),
        ("cluster", {"count": 3.5}),
        ("cluster", {"power_limit_w": math.nan}),
        ("parallel", {"tp": -8}),
        ("parallel", {"global_batch": 1e12}),
        ("software", {"year": -2024}),
        ("model", {"kv_heads": 64}),
        ("model", {"dense_layers": 33, "experts": 8, "topk": 2, "moe_ffn": 1024}),
        ("model", {"topk": 9, "experts": 8, "moe_ffn": 1024}),
    ],
)
def test_figure_that_cannot_be_is_told_with_its_name(part, changes):
    (answer,) = predict([row(**{part: changes})])
    assert set(answer) == {"id", "error"} and f"{part}.{next(iter(changes))} is" in answer["error"]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("model", []),
        ("cluster", 8),
        ("parallel", "tp 8"),
        ("software", True),
        ("model", {"layers": "many"}),
        ("model", {"sliding_window": "1e9"}),
        ("cluster", {"gpu": 100}),
        ("cluster", {"per_node": 0}),
        ("parallel", {"dp": None, "micro_batch": 0}),
        ("software", {"stack": 7, "year": "2024"}),
    ],
)
def test_field_of_another_type_counts_as_left_out_and_the_row_is_answered(part, value):
    (answer,) = predict([row(**{part: value})])
    assert answer["step_time_s"] > 0 and answer["memory_gb"] > 0 and len(answer["assumptions"]) >= 1


def test_what_is_taken_to_be_computed_again_or_to_lie_on_the_host_does_not_fill_the_gpu():
    given = {"dp": 32, "micro_batch": 4, "global_batch": 128}
    (stated,) = predict([row(parallel={**given, "recompute": "none"})])
    (open_,) = predict([row(parallel={**given, "recompute": None})])
    assert not stated["fits"] and open_["fits"] and open_["memory_gb"] < stated["memory_gb"]


def test_predict_command_answers_every_row_of_a_file(tmp_path):
    rows, out = tmp_path / "rows.json", tmp_path / "out.json"
    rows.write_text(json.dumps({"rows": [row("one"), row("two", cluster={"gpu": "none"})]}))
    assert main(["predict", "--rows", str(rows), "--out", str(out)]) == 0
    answers = json.loads(out.read_text())["rows"]
    assert set(answers[0]) >= {"id", "step_time_s", "tokens_per_s_per_gpu", "memory_gb", "fits", "assumptions"}
    assert "error" in answers[1]


def test_without_measurements_scoring_is_skipped_with_a_reason(monkeypatch, capsys):
    monkeypatch.delenv("PHALANX_TRUTH", raising=False)
    assert main(["score"]) == 0 and "skipped: no measurements" in capsys.readouterr().out


def test_fit_finds_a_stack_that_is_slow_and_cross_validation_does_not_see_it():
    rows = [measured(f"quick/{i}", 1.0, parallel={"global_batch": 128 * i}) for i in range(1, 7)]
    slow = {"stack": "slow-one", "year": 2024}
    rows += [measured(f"slow/{i}", 1.3, parallel={"global_batch": 128 * i}, software=slow) for i in range(1, 7)]
    linear = Linear(scored(rows))
    speeds = linear.fit().speeds
    # Part of what both rows say is put down to numbers that are the same for all stacks.
    assert speeds["H100", "slow-one", 2024] < 0.85 * speeds["H100", "megatron-core", 2024]
    errors = np.abs(np.expm1(cross_validated(linear, folds_by_source(linear.rows))))
    of_slow = np.array([each.source == "slow" for each in linear.rows])
    assert errors[of_slow].min() > 0.15 > errors[~of_slow].max()


def test_score_counts_rows_and_its_page_is_made_anew(tmp_path):
    rows = [measured(f"source{i % 3}/{i}", 1.1, parallel={"global_batch": 128 * (1 + i)}) for i in range(6)]
    rows.append({**row("skipped/1"), "measured": {"step_time_s": 1.0}, "score": False})
    found = score(rows)
    assert len(found.rows) == 6 and math.isclose(found.lines()["tier"][0].shipped, 1 - 1 / 1.1, rel_tol=1e-6)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    update(page, markdown(found, score_ranking([], rows), "picture.svg"))
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "stale" not in text and "| tier A | 6 |" in text
    assert scatter(found).count("<circle") == 6 + 1
    page.write_text("nothing")
    with pytest.raises(PhalanxError, match="scoreboard"):
        update(page, "")


def test_regret_is_what_the_chosen_rival_costs_over_the_best():
    rows = [measured("source/one", 1.0), measured("source/full", 1.0, parallel={"recompute": "full"})]
    rivals = [{"id": "source/one", "s_per_sample": 1.1}, {"id": "source/full", "s_per_sample": 1.0}]
    found = score_ranking([{"rows": rivals}], rows)
    assert found.sets == 1 and math.isclose(found.regret, 0.1)


def test_predict_never_writes_over_its_rows_and_replaces_answers_whole(tmp_path, capsys):
    rows, out = tmp_path / "rows.json", tmp_path / "out.json"
    rows.write_text(json.dumps({"rows": [row()]}))
    out.write_text("old")
    assert main(["predict", "--rows", str(rows), "--out", str(rows)]) == 2
    assert "expected another file than --rows" in capsys.readouterr().err
    assert json.loads(rows.read_text()) == {"rows": [row()]}
    assert main(["predict", "--rows", str(rows), "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 1
    rows.write_text("[" * 200_000)
    assert main(["predict", "--rows", str(rows), "--out", str(out)]) == 2 and len(json.loads(out.read_text())) == 1
