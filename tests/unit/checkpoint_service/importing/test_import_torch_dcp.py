"""Imports of folders of torch.distributed.checkpoint, as torch itself writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.foreign_checkpoints import Foreign, assert_equal, torchtitan_state, write_dcp
from torch import nn

from phalanx.checkpoint.importing.run import Import, Options, names_shown
from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, Lineage, LoaderState
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import name_to_hugging_face
from phalanx.snapshot import load
from phalanx.spec import Job
from phalanx.trainer.places import job_store

HALF = Options(rotary="half")


@pytest.mark.parametrize("prefix", ["", "model.", "_orig_mod.", "model._orig_mod."])
def test_weights_moments_and_number_of_updates_are_imported(
    tmp_path: Path, job: Job, foreign: Foreign, prefix: str
) -> None:
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign, prefix=prefix))
    report = Import(job, str(folder), Options(rotary="half", step=7)).run()
    assert_equal(load(job_store(job).url), foreign.tensors())
    assert report.num_updates == 7 and report.optimizer == "imported"
    manifest = Lineage(job_store(job)).manifest(CheckpointRef(1, 7))
    assert manifest.loader == LoaderState(7, 0) and manifest.schedule == {"num_updates": 7}
    assert {"dataloader.dp_rank_0", "lr_scheduler.last_epoch", "train_state.step"} <= set(report.left_out)


def test_the_source_tells_the_step_that_it_had_reached(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    assert Import(job, str(write_dcp(tmp_path / "dcp", torchtitan_state(foreign, 9))), HALF).source_step == 9


def test_interleaved_pairs_give_the_same_function(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """The logits of a decoder that pairs neighbouring elements, as torchtitan's does, are those of the import."""
    Import(job, str(write_dcp(tmp_path / "dcp", torchtitan_state(foreign))), Options(rotary="interleaved")).run()
    found = load(job_store(job).url)
    ours = _decoder(foreign, {name: torch.from_numpy(found[f"model.{name}"]) for name in foreign.weights})
    tokens, positions = torch.arange(12)[None], torch.arange(12)[None]
    expected = _InterleavedDecoder.logits(_decoder(foreign, foreign.weights), tokens, positions)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens, positions, None), expected)
    moment = found["optim.layers.1.attention.wk.weight.exp_avg"].reshape(2, 2, 2, 16)
    theirs = foreign.exp_avg["layers.1.attention.wk.weight"].numpy().reshape(2, 2, 2, 16)
    np.testing.assert_array_equal(moment, theirs.swapaxes(1, 2))


def test_names_of_torchtitan_do_not_say_how_heads_are_paired(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    with pytest.raises(PhalanxError, match="--rotary: expected how the source pairs"):
        Import(job, str(write_dcp(tmp_path / "dcp", torchtitan_state(foreign))))


def test_names_of_hugging_face_are_known_in_a_dcp_folder_too(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = {name_to_hugging_face(name): each.clone() for name, each in foreign.weights.items()}
    Import(job, str(write_dcp(tmp_path / "dcp", state)), Options(with_optimizer=False)).run()
    assert_equal(load(job_store(job).url), foreign.tensors(with_optimizer=False))


def test_a_source_without_optimizer_is_an_error_until_that_is_said(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """Case 5: an optimizer never begins anew silently."""
    folder = write_dcp(tmp_path / "dcp", {name: each.clone() for name, each in foreign.weights.items()})
    with pytest.raises(PhalanxError, match="--without-optimizer"):
        Import(job, str(folder), HALF)
    report = Import(job, str(folder), Options(rotary="half", with_optimizer=False)).run()
    assert report.optimizer == "begins anew" and report.num_updates == 0


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Options(rotary="interleaved"), "rotary half, not interleaved"),
        (Options(rotary="half", with_optimizer=False), "optimizer imported, not begins anew"),
    ],
)
def test_an_import_that_was_begun_otherwise_is_told_by_what_differs(
    tmp_path: Path, job: Job, foreign: Foreign, other: Options, told: str
) -> None:
    folder = str(write_dcp(tmp_path / "dcp", torchtitan_state(foreign)))
    Import(job, folder, HALF).run()
    with pytest.raises(PhalanxError, match=f"a job whose import was begun with {told}"):
        Import(job, folder, other).run()


def test_missing_and_unknown_state_of_the_optimizer_is_named(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """Case 5."""
    state = torchtitan_state(foreign)
    del state["optimizer"]["state.norm.weight.exp_avg_sq"], state["optimizer"]["state.norm.weight.step"]
    state["optimizer"]["state.norm.weight.max_exp_avg_sq"] = torch.zeros(16)
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)
    names = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert names == ["optimizer.state.norm.weight.max_exp_avg_sq", "optimizer state"]
    assert "lacks 2 of 63: norm.weight exp_avg_sq, norm.weight step; " in str(caught.value)


def test_missing_state_of_a_layer_is_one_line_that_offers_to_begin_anew(
    tmp_path: Path, job: Job, foreign: Foreign
) -> None:
    """Case 5: not a line for each of its 27 tensors."""
    state = torchtitan_state(foreign)
    state["optimizer"] = {key: each for key, each in state["optimizer"].items() if ".layers.1." not in key}
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)
    (line,) = str(caught.value).splitlines()
    assert (
        "lacks 27 of 63: layers.1.*; import from a folder that has all, or import it with --without-optimizer" in line
    )


def test_names_of_one_pattern_are_one_line_with_their_number(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = torchtitan_state(foreign)
    state |= {f"layers.{layer}.attention.bias": torch.zeros(3) for layer in range(5)}
    state |= {name: torch.zeros(7, 7) for name in foreign.weights if name.endswith("wq.weight")}
    with pytest.raises(PhalanxError) as caught:
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)
    unknown, shaped = str(caught.value).splitlines()
    assert unknown.startswith("layers.*.attention.bias (5 of them: layers.0.attention.bias, layers.1.")
    assert "--leave-out layers.2.attention.bias and so on, 5 in all" in unknown
    assert shaped.startswith("layers.*.attention.wq.weight (2 of them: ") and "is 'float32 [7, 7]'" in shaped


@pytest.mark.parametrize("count", [7, 7.0])
def test_number_of_updates_that_is_no_tensor_is_read(tmp_path: Path, job: Job, foreign: Foreign, count: float) -> None:
    """As some optimizers keep it; for some parameters a tensor, for others a number, is well too."""
    state = torchtitan_state(foreign)
    for name in list(foreign.weights)[1:]:
        state["optimizer"][f"state.{name}.step"] = count
    folder = write_dcp(tmp_path / "dcp", state)
    report = Import(job, str(folder), HALF).run()
    assert report.num_updates == 7 and not [name for name in report.left_out if name.endswith("weight.step")]
    assert_equal(load(job_store(job).url), foreign.tensors())


WHOLE = r"whole numbers of updates from 0 to 99,999,999.*--without-optimizer"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, r"'3 in optimizer\.state\.norm\.weight\.step; 7 in .* and 17 more': expected one number of updates"),
        (-7, rf"'-7 in .*{WHOLE}"),
        ("7", r"optimizer\.state\.norm\.weight\.step of file.*is no number.*import it with --without-optimizer"),
        (None, r"optimizer\.state\.norm\.weight\.step of file.*is no number"),
        (torch.tensor(float("nan")), WHOLE),
    ],
)
def test_number_of_updates_that_is_none_or_another_is_refused(
    tmp_path: Path, job: Job, foreign: Foreign, count: object, expected: str
) -> None:
    state = torchtitan_state(foreign)
    state["optimizer"]["state.norm.weight.step"] = count
    folder = write_dcp(tmp_path / "dcp", state)
    with pytest.raises(PhalanxError, match=expected):
        Import(job, str(folder), HALF)
    assert Import(job, str(folder), Options(rotary="half", with_optimizer=False)).num_updates == 0


@pytest.mark.parametrize("count", [-3.5, 2.0**40, float("inf")])
def test_a_number_of_updates_that_is_none_is_no_better_everywhere(
    tmp_path: Path, job: Job, foreign: Foreign, count: float
) -> None:
    state = torchtitan_state(foreign)
    state["optimizer"] |= {f"state.{name}.step": torch.tensor(count) for name in foreign.weights}
    with pytest.raises(PhalanxError, match=rf"{count:.12g} in .*{WHOLE}".replace("+", r"\+")):
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)


def test_a_number_of_updates_in_bfloat16_is_read_as_it_is_meant(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = torchtitan_state(foreign)
    state["optimizer"]["state.norm.weight.step"] = torch.tensor(7, dtype=torch.bfloat16)
    assert Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF).num_updates == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_no_job_can_begin_with_are_named_and_never_committed(
    tmp_path: Path, job: Job, foreign: Foreign, value: float
) -> None:
    state = torchtitan_state(foreign)
    state["norm.weight"][3] = value
    with pytest.raises(PhalanxError, match=r"norm\.weight is '1 values that are NaN or infinite"):
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF).run()
    assert Lineage(job_store(job)).checkpoints() == ()


def test_parameters_that_were_updated_unequally_often_are_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = torchtitan_state(foreign)
    state["optimizer"]["state.norm.weight.step"] = torch.tensor(3.0)
    with pytest.raises(PhalanxError, match="one number of updates"):
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)


def test_transposed_values_are_refused_not_misread(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """torch.save keeps strides: read as they lie, the bytes would be another matrix."""
    state = torchtitan_state(foreign)
    name = "layers.0.attention.wo.weight"
    state[name] = state[name].t().contiguous().t()
    with pytest.raises(PhalanxError, match=rf"{name}.*strides"):
        Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF)


def test_slices_of_a_larger_storage_are_found(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = torchtitan_state(foreign)
    both = torch.cat([state["norm.weight"], state["norm.weight"] + 1])
    state["norm.weight"] = both[:16]
    Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF).run()
    assert_equal(load(job_store(job).url), foreign.tensors())


def test_bfloat16_weights_and_fp32_moments_are_widened(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    state = torchtitan_state(foreign)
    state |= {name: each.bfloat16() for name, each in foreign.weights.items()}
    Import(job, str(write_dcp(tmp_path / "dcp", state)), HALF).run()
    found = load(job_store(job).url)
    for name, each in foreign.weights.items():
        np.testing.assert_array_equal(found[f"model.{name}"], each.bfloat16().float().numpy())


def test_a_missing_file_of_the_folder_is_named(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign))
    (file,) = folder.glob("*.distcp")
    file.rename(folder / "other.distcp")
    with pytest.raises(PhalanxError, match=file.name):
        Import(job, str(folder), HALF)


def test_a_truncated_file_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign))
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PhalanxError, match="copy it again"):
        Import(job, str(folder), HALF)


def test_overwritten_archives_are_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign))
    (file,) = folder.glob("*.distcp")
    file.write_bytes(b"\x80" * file.stat().st_size)
    with pytest.raises(PhalanxError, match=r"torch\.save"):
        Import(job, str(folder), HALF)


def test_a_dry_run_shows_every_tensor_and_writes_nothing(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_dcp(tmp_path / "dcp", torchtitan_state(foreign))
    planned = Import(job, str(folder), Options(rotary="interleaved"))
    shown = dict(names_shown(planned.plan))
    assert len(shown) == 3 * len(foreign.weights)
    assert shown["model.norm.weight"] == "norm.weight (float32)"
    assert shown["model.layers.0.attention.wq.weight"].endswith("rows of heads reordered)")
    assert not (tmp_path / "store").exists()


def _decoder(foreign: Foreign, weights: object) -> Decoder:
    decoder = Decoder(foreign.args)
    decoder.load_state_dict(dict(weights))  # type: ignore[call-overload]
    return decoder


class _InterleavedDecoder(nn.Module):
    """The decoder with rotary positions as complex numbers of neighbouring elements (Meta's Llama)."""

    @staticmethod
    @torch.no_grad()
    def logits(decoder: Decoder, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        import phalanx.models.attention as module

        def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
            half = x.shape[-1] // 2
            turn = torch.complex(cosines[..., :half], sines[..., :half])
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], half, 2).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "rotate", rotate)
            return decoder(tokens, positions, None)  # type: ignore[no-any-return]
