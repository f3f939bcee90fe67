"""DeepSeek-V3 in small, trained as a run trains it: over restarts in other layouts, each of which exports to
transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.jobs import losses_of, newest_tensors, run_cli, run_here, write_job

from phalanx.gang import ForkServer
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.spec.presets import PRESETS

LAYOUTS = (
    ("cluster.nproc=1", "parallel.local_batch_size=8"),
    ("cluster.nproc=2", "parallel.tp=2", "parallel.local_batch_size=2"),
    ("cluster.nproc=2", "parallel.pp=2", "parallel.local_batch_size=2", "activation_checkpoint.mode=selective"),
    ("cluster.nproc=4", "parallel.cp=2", "parallel.ep=2", "parallel.local_batch_size=2"),
)


def _job(folder: Path, corpus: str) -> Path:
    folder.mkdir()
    path = write_job(folder, corpus, steps=2 * len(LAYOUTS))
    path.write_text(path.read_text().replace('preset = "tiny"', 'preset = "deepseek-v3-tiny"'))
    return path


def test_latents_go_on_in_other_layouts_with_the_losses_of_one_process_and_each_exports(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    whole, moved = (_job(tmp_path / name, corpus) for name in ("whole", "moved"))
    run_here(whole, server, *LAYOUTS[0])
    tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(1))
    for number, layout in enumerate(LAYOUTS):
        run_here(moved, server, *layout, f"training.steps={2 * number + 2}")
        folder = tmp_path / f"hf{number}"
        exported = run_cli(["checkpoint", "export", moved, "latest", "--out", folder])
        assert exported.code == 0, exported.err
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
        decoder, found = Decoder(DecoderArgs.of_plain(PRESETS["deepseek-v3-tiny"])), newest_tensors(moved)
        decoder.load_state_dict({name: torch.from_numpy(found[f"model.{name}"]) for name in decoder.state_dict()})
        with torch.no_grad():
            ours = decoder(tokens, torch.arange(100).expand(2, -1), None)
            torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    expected, found_losses = losses_of(whole), losses_of(moved)
    assert expected.keys() == found_losses.keys() and len(expected) == 2 * len(LAYOUTS)
    for step, loss in expected.items():
        assert found_losses[step] == pytest.approx(loss, rel=1e-5), step
