"""Fields of published measurements that are wrong, unknown or at odds with each other; the rows are made up."""

from __future__ import annotations

import json
import math

import pytest
from benchmarks.planner import __main__ as command
from benchmarks.planner.predict import predict

MODEL = {
    "layers": 36,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 32,
    "ffn": 16_384,
    "vocab": 51_200,
    "seq": 2048,
    "params": 7.5e9,
    "activation": "gelu",
}
PARALLEL = {
    "dp": 32,
    "tp": 4,
    "pp": 1,
    "micro_batch": 2,
    "global_batch": 512,
    "recompute": "full",
    "zero": 0,
    "precision": "fp16",
    "seq_parallel": False,
    "schedule": "1F1B",
}
CLUSTER = {"gpu": "A100-SXM-80GB", "per_node": 8, "count": 128, "interconnect": "8x200Gb per node"}
SOFTWARE = {"stack": "megatron-lm", "year": 2021}
PARTS = {"model": MODEL, "parallel": PARALLEL, "cluster": CLUSTER, "software": SOFTWARE}
# The same with a pipeline of 4 in place of the tensors' axis.
PIPELINE = {"tp": 1, "pp": 4}


def answer(part="model", **changes):
    made = {name: dict(fields) for name, fields in PARTS.items()}
    made[part] |= changes
    return predict([{"id": "made/up", **made}])[0]


def without(part, *names):
    return {**PARTS, part: {key: value for key, value in PARTS[part].items() if key not in names}}


def figures(answered):
    return {name: value for name, value in answered.items() if name != "assumptions"}


def test_row_whose_counts_agree_is_answered_with_nothing_assumed():
    assert answer()["assumptions"] == []


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("recompute", value) for value in (True, math.nan, 2.5, [], {}, 0)),
        *(("seq_parallel", value) for value in ("", "eight", math.nan, {}, -1, 1)),
        *(("zero", value) for value in (True, [], {})),
        *(("precision", value) for value in (16, True, [])),
        *(("schedule", value) for value in (1, True, [], {})),
    ],
)
def test_parallel_field_of_another_type_is_as_if_it_were_not_there_and_is_named(name, wrong):
    found = answer("parallel", **{name: wrong})
    (left_out,) = predict([{"id": "made/up", **without("parallel", name)}])
    assert figures(found) == figures(left_out)
    assert any(f"parallel.{name} is " in said and "taken as not given" in said for said in found["assumptions"])


@pytest.mark.parametrize(
    ("part", "name", "wrong"),
    [
        ("model", "activation", "wat"),
        ("parallel", "recompute", "wat"),
        ("parallel", "zero", "wat"),
        ("parallel", "zero", "2.5"),
        ("parallel", "zero", "7"),
        ("parallel", "precision", "wat"),
        ("parallel", "schedule", "wat"),
        ("cluster", "topology", "wat"),
        ("software", "stack", "wat"),
    ],
)
def test_word_that_means_nothing_here_is_named(part, name, wrong):
    found = answer(part, **{name: wrong})
    assert any(repr(wrong) in said and "is not known" in said for said in found["assumptions"])


@pytest.mark.parametrize("schedule", ["zb-v", "ZB-V", "GPIPE", "1f1b", "Interleaved-1F1B"])
def test_schedules_are_known_in_any_case(schedule):
    found = answer("parallel", **PIPELINE, dp=32, schedule=schedule, vp=1)
    assert not any("is not known" in said for said in found["assumptions"])


@pytest.mark.parametrize(
    ("zero", "same"), [("ZeRO-1", 1), ("stage 2", 2), (1.0, 1), ("zero3", 3), ("FSDP-256", 3), ("1 (optimizer)", 1)]
)
def test_stage_is_read_from_numbers_and_words(zero, same):
    assert answer("parallel", zero=zero) == answer("parallel", zero=same)


@pytest.mark.parametrize(
    ("part", "name", "wrong", "expected"),
    [
        ("parallel", "zero", 2.5, "a whole number from 0 to 3"),
        ("parallel", "zero", 1e300, "a whole number from 0 to 3"),
        ("parallel", "zero", 7, "a whole number from 0 to 3"),
        ("parallel", "zero", -1, "a whole number from 0 to 3"),
        ("parallel", "dp", 1e-300, "a whole number from 0 to 10,000,000"),
        ("parallel", "vp", 1e-300, "a whole number from 0 to 2,000"),
        ("cluster", "hbm_tbps", 1e-300, "a number from 0.01"),
        ("cluster", "power_limit_w", 1e-9, "a number from 10"),
        ("model", "params", 0.5, "a number from 1,000"),
        ("parallel", "global_batch", 3, "a multiple of 32 replicas x micro-batch 2"),
        ("parallel", "global_batch", 513, "a multiple of 32 replicas x micro-batch 2"),
        ("parallel", "grad_accum", 99, "expected 8, as of batch 512"),
        ("parallel", "microbatches", 7, "expected 8, as of batch 512"),
        ("cluster", "per_node", 256, "at most the cluster's 128 GPUs"),
        ("model", "heads", 8192, "a divisor of the width 4096"),
        ("model", "kv_heads", 5, "a divisor of the 32 heads"),
        ("model", "params", 1e12, "about the 7."),
    ],
)
def test_figure_that_another_one_contradicts_is_an_error_that_names_it(part, name, wrong, expected):
    found = answer(part, **{name: wrong})
    assert set(found) == {"id", "error"}
    assert f"{part}.{name} is" in found["error"] and expected in found["error"] and "correct the row" in found["error"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp": 37, "tp": 1, "dp": 1}, "parallel.pp is 37: expected at most 36 stages for 36 layers"),
        ({"pp": 4, "tp": 1, "vp": 12}, "parallel.vp is 12: expected at most 38 stages for 36 layers"),
        ({"tp": 64, "dp": 2}, "parallel.tp is 64: expected at most the 32 heads"),
    ],
)
def test_axis_longer_than_what_it_cuts_is_an_error(changes, said):
    made = {**PARTS, "parallel": PARALLEL | changes, "cluster": {"gpu": "A100-80"}}
    assert said in predict([{"id": "made/up", **made}])[0]["error"]


def test_more_expert_ranks_than_experts_is_an_error():
    model = {key: value for key, value in MODEL.items() if key != "params"} | {"experts": 8, "topk": 2, "moe_ffn": 512}
    (found,) = predict([{"id": 1, **PARTS, "model": model, "parallel": {**PARALLEL, "ep": 16}}])
    assert "parallel.ep is 16: expected at most the 8 experts" in found["error"]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_axis_that_is_left_open_is_what_the_others_leave_of_the_gpus(axis):
    full = {**PARALLEL, "tp": 1, "pp": 1, "cp": 1, "recompute": "full"}
    open_ = {key: value for key, value in full.items() if key != axis}
    stated, derived = predict([{"id": i, **PARTS, "parallel": {**each}} for i, each in enumerate((full, open_))])
    assert "32 ranks" in stated["error"] and "step_time_s" in derived
    assert f"{axis} not given: 4, what the other axes leave of 128 GPUs" in derived["assumptions"]
    (again,) = predict([{"id": 1, **PARTS, "parallel": full | {axis: 4}}])
    assert figures(again) == figures(derived)


def test_micro_batch_that_is_left_open_follows_from_the_batch_and_its_number():
    parallel = {key: value for key, value in PARALLEL.items() if key != "micro_batch"} | {"grad_accum": 4}
    (found,) = predict([{"id": 1, **PARTS, "parallel": parallel}])
    assert "micro-batch not given: 4, of 512 windows in 4 micro-batches" in found["assumptions"]


def test_field_that_is_none_of_a_rows_is_named_with_what_may_be_meant():
    found = answer("parallel", Tp=9, wat=1)["assumptions"]
    assert "parallel.Tp is no field of a row: not read; tp may be meant" in found
    assert any(said.startswith("parallel.wat is no field") for said in found)
    assert answer("parallel", etp=1)["assumptions"] == []


@pytest.mark.parametrize("kind", ["TPUv5p", "V100"])
def test_unknown_gpu_of_a_row_has_a_remedy_that_a_row_can_take(kind):
    error = answer("cluster", gpu=kind)["error"]
    assert f"cluster.gpu is {kind!r}" in error and "gpu_memory_gib" not in error and "did you mean" not in error
    assert "did you mean H100-80?" in answer("cluster", gpu="H10-80")["error"]


def test_rows_of_one_id_say_so():
    found = predict([{"id": "one", **PARTS}, {"id": "one", **PARTS}, {"id": "two", **PARTS}])
    assert [len(each["assumptions"]) for each in found] == [1, 1, 0]
    assert "id stands on 2 rows" in found[0]["assumptions"][0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "correct it: Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b'\xef\xbb\xbf{"rows": []}', "BOM"),
        (b"[]", "write an object with rows"),
        (b'{"rows": 3}', "rows that are a list"),
        (b'{"rows": [{"no": "id"}]}', "rows[0]: expected an object with an id"),
        (b'{"rows": [{"id": "a"}, {"id": null}]}', "rows[1]"),
        (b'{"rows": [{"id": []}]}', "rows[0]"),
        (b'{"rows": [{"id": {}}]}', "rows[0]"),
        (b'{"rows": [{"id": ""}]}', "rows[0]"),
        (None, "No such file or directory; name another file"),
    ],
)
def test_file_that_holds_no_rows_exits_2_with_one_line_that_says_why(tmp_path, data, said, capsys):
    rows = tmp_path / "rows.json"
    if data is not None:
        rows.write_bytes(data)
    assert command.main(["predict", "--rows", str(rows), "--out", str(tmp_path / "out.json")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and "--rows" in err and str(rows) in err


@pytest.mark.parametrize(("out", "reason"), [("", "Is a directory"), ("/dev/full", "No space left on device")])
def test_answers_that_cannot_be_written_name_the_option_and_the_reason(tmp_path, out, reason, capsys):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"rows": []}))
    assert command.main(["predict", "--rows", str(rows), "--out", out]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "--out is" in err and "expected a file that can be written" in err and reason in err


def test_interrupted_command_says_so_in_one_line(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_rows", interrupt)
    assert command.main(["predict", "--rows", "rows.json", "--out", "out.json"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
