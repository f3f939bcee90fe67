"""What a job names of the user's own: refused in one line before a rank starts, and the optimizer's state kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.box import Box, HeldTensor
from phalanx.core.errors import PhalanxError
from phalanx.parallel.replicas import ReplicaLink
from phalanx.spec import Job, parse_job
from phalanx.trainer.optimizer import Optimizer, optimizer_of
from phalanx.trainer.own_checks import check_own
from phalanx.trainer.own_optimizer import rule_of

TABLES: dict[str, dict[str, Any]] = {
    "job": {"name": "own", "storage": "memory://own"},
    "model": {"class": "own_parts:Plain", "args": {"vocab_size": 32}},
    "data": {"train": "memory://nothing/train"},
    "training": {"seq_len": 32, "steps": 4, "global_batch_size": 8, "max_norm": 0.0},
    "optimizer": {"lr": 0.1},
}


def _job(**sections: Any) -> Job:
    return parse_job({name: {**TABLES.get(name, {}), **sections.get(name, {})} for name in TABLES.keys() | sections})


def _model(name: str, **args: Any) -> dict[str, Any]:
    return {"class": f"own_parts:{name}", "args": {"vocab_size": 32, **args}}


def _cut(head: str = "vocab_head", **styles: str) -> dict[str, dict[str, Any]]:
    plan = {"embed": "vocab_embedding", "layers.*": "replicated", "head": head, **styles}
    return {"model": _model("Cut", plan=plan), "parallel": {"tp": 2}}


PP2, CP2 = {"pp": 2}, {"cp": 2}
TP2: dict[str, dict[str, Any]] = {"parallel": {"tp": 2}}
REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no class": ({"model": _model("Nothing")}, 1, r"model\.class is 'own_parts:Nothing': .*importable.*code\.path"),
    "no module": ({"model": {"class": "nothing:X", "args": {}}}, 1, r"model\.class is 'nothing:X'"),
    "wrong argument": ({"model": _model("Plain", depth=3)}, 1, r"model\.args is .*Plain\(.*unexpected keyword.*depth"),
    "tp": ({"parallel": {"tp": 2}}, 2, r"parallel\.tp is 2: expected 1, because Plain has no parallel_plan\(\)"),
    "cp": ({"parallel": CP2}, 2, r"parallel\.cp is 2: expected 1, because Plain has no set_context\(context\)"),
    "head": (
        {"loss": {"chunk_tokens": 4}},
        1,
        r"loss\.chunk_tokens is 4: expected 0, because Plain has no detach_head",
    ),
    "loss of two tokens": (
        {"model": _model("Sharing"), "parallel": CP2, "loss": {"fn": "own_parts:neighbours"}},
        2,
        r"loss\.fn is .*with \[parallel\] cp > 1 a function of each token by itself",
    ),
    "pp": ({"parallel": PP2}, 2, r"parallel\.pp is 2: expected 1, because Plain has no split_stages\(num_stages\)"),
    "plan": ({"model": _model("Planned"), "parallel": {"tp": 2}}, 2, r"parallel_plan\(\) is 'head.weight'"),
    "width": ({"model": _model("Planned", dim=9), "parallel": {"tp": 2}}, 2, r"parallel\.tp is 2: expected a divisor"),
    "stages": ({"model": _model("Staged"), "parallel": PP2}, 2, r"split_stages\(\) is 'layers\.3\.bias, layers\.3\.w"),
    "number of stages": ({"model": _model("Staged"), "parallel": {"pp": 4}}, 4, r"split_stages\(\) is 2: expected 4"),
    "loss raises": ({"loss": {"fn": "own_parts:raises"}}, 1, r"loss\.fn.*RuntimeError: no such kernel"),
    "loss of a mean": ({"loss": {"fn": "own_parts:mean"}}, 1, r"loss\.fn is 'own_parts:mean': expected a sum over"),
    "loss of all": ({"loss": {"fn": "own_parts:counts_all"}}, 1, r"loss\.fn.*windows without targets"),
    "loss is no tensor": ({"loss": {"fn": "own_parts:a_number"}}, 1, r"loss\.fn.*not float"),
    "loss argument": ({"loss": {"fn": "own_parts:cross_entropy", "args": {"z": 1}}}, 1, r"loss\.fn.*argument 'z'"),
    "metric": ({"metrics": {"fn": {"top": "own_parts:mean"}}}, 1, r"metrics\.fn\.top is 'own_parts:mean'"),
    "no optimizer": ({"optimizer": {"class": "own_parts:Plain"}}, 1, r"optimizer\.class.*torch\.optim\.Optimizer"),
    "argument": ({"optimizer": {"class": "own_parts:Lion", "args": {"x": 1}}}, 1, r"optimizer\.args.*argument 'x'"),
    "norm": ({"optimizer": {"class": "own_parts:ByNorm"}}, 1, r"optimizer\.class.*element-wise rule"),
    "rows": ({"optimizer": {"class": "own_parts:ByRows"}}, 1, r"'rows' is a Tensor of shape \(4,\)"),
    "learnt": ({"optimizer": {"class": "own_parts:Learnt"}}, 1, r"learnt for all parameters together"),
    "no blocks": (
        {"model": _model("Blockless"), "optimizer": {"name": "muon"}},
        1,
        r"optimizer\.name is 'muon': expected adamw with Blockless, which has no matrix inside `layers`",
    ),
    "init": (
        {"model": _model("Fails", where="__init__")},
        1,
        r"model\.class is 'own_parts:Fails': .*RuntimeError: no such size \(.*own_parts\.py:\d+\)$",
    ),
    "exit": ({"model": _model("Fails", where="exit")}, 1, r"model\.class is .*SystemExit: 0 \(.*own_parts\.py"),
    "super": ({"model": _model("Fails", where="super")}, 1, r"model\.class is 'Fails': .*super\(\)\.__init__\(\)"),
    "nothing to train": ({"model": _model("Frozen")}, 1, r"model\.class is .*expected a module with a parameter that"),
    "forward": (
        {"model": _model("Fails", where="forward")},
        1,
        r"model\.class is .*forward to give logits \[1 window, 32 tokens, voc.*Error: no such \(.*parts\.py:\d+\)$",
    ),
    "hidden": ({"model": _model("Fails", where="hidden")}, 1, r"logits .*, not torch\.bfloat16 of shape \(32, 32\)"),
    "tokens": ({"model": _model("Fails", where="tokens")}, 1, r"logits .*, not torch\.int64 of shape \(1, 32\)"),
    "pair": ({"model": _model("Fails", where="pair")}, 1, r"logits .*, not a tuple"),
    "initial raises": ({"model": _model("Fails", where="initial_weights")}, 1, r"initial_weights\(\): .*no such \("),
    "initial none": ({"model": _model("Fails", where="none")}, 1, r"initial_weights\(\): .*TypeError: 'NoneType'"),
    "initial float": ({"model": _model("Fails", where="float")}, 1, r"initial_weights\(\) head\.weight is 0\.1: "),
    "initial missing": (
        {"model": _model("Fails", where="missing")},
        1,
        r"initial_weights\(\) layers\.0\.weight is 'mis",
    ),
    "initial nan": (
        {"model": _model("Fails", where="nan")},
        1,
        r"initial_weights\(\) head\.weight is Initial\(std=nan",
    ),
    "initial negative": ({"model": _model("Fails", where="negative")}, 1, r"initial_weights\(\) head\.weight is In"),
    "initial text": ({"model": _model("Fails", where="text")}, 1, r"initial_weights\(\) head\.weight is Initial\("),
    "plan raises": ({"model": _model("Fails", where="parallel_plan"), **TP2}, 2, r"parallel_plan\(\): .*no such \("),
    "plan none": ({"model": _model("Fails", where="no plan"), **TP2}, 2, r"parallel_plan\(\) is 'NoneType': .*a dict"),
    "plan list": ({"model": _model("Fails", where="list"), **TP2}, 2, r"parallel_plan\(\) is 'list': expected a dict"),
    "plan key": (
        {"model": _model("Fails", where="key"), **TP2},
        2,
        r"parallel_plan\(\) is \{3: .*by patterns of names",
    ),
    "plan number": ({"model": _model("Fails", where="number"), **TP2}, 2, r"parallel_plan\(\) head is 3: .*a style"),
    "plan of nothing": (
        _cut(normm="sequence_norm"),
        2,
        r"parallel_plan\(\) is 'normm': .* name a module of Cut; correct",
    ),
    "plan without gather": (_cut(), 2, r"parallel_plan\(\): .*, 32 / 2\] on each rank, not .*\(1, 16, 16\)"),
    "plan of a whole head": (
        _cut("replicated", norm="sequence_norm"),
        2,
        r"parallel_plan\(\): .* not of shape \(1, 32, 32\); give the head the style vocab_head",
    ),
    "plan that fails": (
        _cut("rowwise", norm="sequence_norm"),
        2,
        r"parallel_plan\(\): .*RuntimeError: .*own_parts\.py:\d+\)$",
    ),
    "split raises": (
        {"model": _model("Fails", where="split_stages"), "parallel": PP2},
        2,
        r"split_stages\(\): .*no such",
    ),
    "split none": ({"model": _model("Fails", where="no stages"), "parallel": PP2}, 2, r"split_stages\(\): .*NoneType"),
    "split numbers": (
        {"model": _model("Fails", where="numbers"), "parallel": PP2},
        2,
        r"split_stages\(\) is 'with a int",
    ),
    "few layers": (
        {"model": _model("Fails", where="few layers"), "parallel": {"pp": 8}},
        8,
        r"split_stages\(\) is 8: expected at most 4 stages, as the model has 4 layers; lower parallel\.pp",
    ),
    "stage forward": (
        {"model": _model("SharingStaged"), "parallel": PP2},
        2,
        r"split_stages\(\) stage 0: expected a forward that runs on the meta device.*NotImplementedError",
    ),
    "loss detached": ({"loss": {"fn": "own_parts:detached"}}, 1, r"loss\.fn is .*a finite gradient by its logits"),
    "loss gradient": ({"loss": {"fn": "own_parts:no_gradient"}}, 1, r"loss\.fn is .*a finite gradient by its logits"),
    "loss changes": (
        {"loss": {"fn": "own_parts:changes"}},
        1,
        r"loss\.fn is .*leaves its logits and targets as they are",
    ),
    "loss exits": ({"loss": {"fn": "own_parts:exits"}}, 1, r"loss\.fn is .*SystemExit: 0 \(.*own_parts\.py"),
    "unmade": (
        {"optimizer": {"class": "own_parts:Unmade"}},
        1,
        r"optimizer\.class is .*KeyError: 'momentum' \(.*parts",
    ),
    "no base": ({"optimizer": {"class": "own_parts:Empty"}}, 1, r"optimizer\.class is .*param_groups.*AttributeError"),
    "closure": (
        {"optimizer": {"class": "torch.optim:LBFGS"}},
        1,
        r"optimizer\.class is .*step\(\).*TypeError: .*closure",
    ),
    "no state": (
        {"optimizer": {"class": "own_parts:Stateless"}},
        1,
        r"optimizer\.class is .*AttributeError: 'NoneType'",
    ),
    "diverges": ({"optimizer": {"class": "own_parts:Diverges"}}, 1, r"optimizer\.class is .*finite weights finite"),
    "rprop": ({"optimizer": {"class": "torch.optim:ASGD"}}, 1, r"numbers that count updates, but state"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_own_part_that_ranks_could_not_run_is_refused_in_one_line(what: str) -> None:
    sections, world_size, told = REFUSED[what]
    job = _job(**sections)
    with pytest.raises(PhalanxError, match=told) as refused:
        check_own(job, job.layout(world_size))
    assert "\n" not in str(refused.value)


def test_own_module_that_fails_tells_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_failing.py").write_text("x = 1\ny = x / 0\n")
    job = _job(model={"class": "own_failing:Model"})
    with pytest.raises(PhalanxError, match=r"ZeroDivisionError: division by zero \(.*own_failing\.py:2\)"):
        check_own(job, job.layout(1))


def test_own_module_that_exits_or_misses_an_attribute_tells_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, line, shown in (
        ("own_exiting", "raise SystemExit('bye')", "SystemExit: bye"),
        ("own_lacking", "import torch; torch.no_such_thing", "AttributeError: .*no_such_thing"),
        ("own_needing", "import no_such_module", "ModuleNotFoundError: .*no_such_module"),
    ):
        (tmp_path / f"{name}.py").write_text(f"x = 1\n{line}\n")
        job = _job(model={"class": f"{name}:Model"})
        with pytest.raises(PhalanxError, match=rf"model\.class is .*{shown}.* \(.*{name}\.py:2\)"):
            check_own(job, job.layout(1))


@pytest.mark.parametrize("where", ["needs values", "needs a GPU", "needs a place"])
def test_forward_that_only_ranks_can_run_is_left_to_them(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    job = _job(model=_model("Fails", where=where))
    check_own(job, job.layout(1))


def test_plan_with_which_forward_runs_passes() -> None:
    job = _job(**_cut(norm="sequence_norm"))
    check_own(job, job.layout(2))


def test_working_folder_outlives_a_class_that_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = _job(model=_model("Wanders", folder="/"))
    check_own(job, job.layout(1))
    assert Path.cwd() == tmp_path


def test_logits_of_fewer_tokens_than_the_tokenizer_has_are_refused() -> None:
    job = _job()
    check_own(job, job.layout(1), 32)
    with pytest.raises(PhalanxError, match=r"model\.args is .*at least the tokenizer's 33 tokens, .* gives 32"):
        check_own(job, job.layout(1), 33)


def test_own_parts_that_fit_pass() -> None:
    job = _job(
        loss={"fn": "own_parts:cross_entropy", "args": {"scale": 0.5}},
        metrics={"fn": {"accuracy": "own_parts:accuracy"}},
        optimizer={"class": "own_parts:Lion", "args": {"beta": 0.5}},
    )
    check_own(job, job.layout(2))
    alone = {"model": _model("Sharing"), "loss": {"fn": "own_parts:cross_entropy"}}
    sharing = _job(**alone, parallel={"cp": 2})
    check_own(sharing, sharing.layout(2))
    plain = _job(loss={"fn": "own_parts:neighbours"})
    check_own(plain, plain.layout(2))


@pytest.mark.parametrize(
    ("name", "args", "moments"),
    [
        ("own_parts:Lion", {}, ("momentum",)),
        ("torch.optim:SGD", {"momentum": 0.9, "dampening": 0.5}, ("momentum_buffer",)),
        ("torch.optim:SGD", {}, ()),
        ("torch.optim:RMSprop", {"centered": True}, ("square_avg", "grad_avg")),
        ("torch.optim:Adamax", {}, ("exp_avg", "exp_inf")),
        ("torch.optim:RAdam", {}, ("exp_avg", "exp_avg_sq")),
        ("torch.optim:Rprop", {}, ("prev", "step_size")),
        ("torch.optim:Adagrad", {"initial_accumulator_value": 0.1}, ("sum",)),
    ],
)
def test_own_optimizer_resumes_bit_for_bit_from_what_a_checkpoint_holds(
    name: str, args: dict[str, Any], moments: tuple[str, ...]
) -> None:
    job = _job(optimizer={"class": name, "args": args})
    assert set(rule_of(job).moments) == set(moments)
    whole = _stepped(job, 4)[0]
    first, optimizer = _stepped(job, 2)
    assert [held.name for held in optimizer.state()] == [f"optim.{n}.{m}" for n in "abc" for m in optimizer.moments]
    resumed, other = _held([held.local.clone() for held in first]), None
    other = optimizer_of(job, resumed, ReplicaLink(None))
    for empty, saved in zip(other.state(), optimizer.state(), strict=True):
        empty.local.copy_(saved.local)
    other.resume(optimizer.counters())
    _step(other, resumed, range(2, 4))
    for expected, found in zip(whole, resumed, strict=True):
        assert torch.equal(expected.local, found.local), found.name


def test_own_optimizer_before_its_first_update_is_restored_as_new() -> None:
    job = _job(optimizer={"class": "torch.optim:Rprop"})
    held = _held(_values())
    optimizer = optimizer_of(job, held, ReplicaLink(None))
    assert all(not each.local.any() for each in optimizer.state())
    optimizer.resume({"num_updates": 0})
    _step(optimizer, held, range(4))
    assert all(torch.equal(a.local, b.local) for a, b in zip(held, _stepped(job, 4)[0], strict=True))


def _values() -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 6).view(2, 3), torch.ones(3), torch.ones(0, 3)]


def _held(values: list[torch.Tensor]) -> list[HeldTensor]:
    return [
        HeldTensor(name, tuple(value.shape), Box((0,) * value.dim(), tuple(value.shape)), value)
        for name, value in zip("abc", values, strict=True)
    ]


def _stepped(job: Job, num_steps: int) -> tuple[list[HeldTensor], Optimizer]:
    held = _held(_values())
    optimizer = optimizer_of(job, held, ReplicaLink(None))
    _step(optimizer, held, range(num_steps))
    return held, optimizer


def _step(optimizer: Optimizer, held: list[HeldTensor], steps: range) -> None:
    for step in steps:
        optimizer.update([torch.sin(each.local + step) for each in held], 1.0, 0.5)
