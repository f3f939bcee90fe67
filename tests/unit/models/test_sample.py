"""Opening an exported folder, with an output head of its own or tied to the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phalanx.core.errors import PhalanxError
from phalanx.models.args import DecoderArgs
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face
from phalanx.models.sample import load_decoder


@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True}, {"qk_norm": True, "head_dim": 16}, {"qkv_bias": True}])
def test_loaded_decoder_gives_the_logits_of_the_exported_one(tmp_path: Path, more: dict[str, Any]) -> None:
    args = DecoderArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=64, **more)
    torch.manual_seed(0)
    decoder = Decoder(args)
    config = config_to_hugging_face(args, max_position_embeddings=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {name_to_hugging_face(name): p.detach() for name, p in decoder.named_parameters()}  # a tied head once
    assert ("lm_head.weight" in named) is not args.tie_embeddings
    save_file(named, tmp_path / "model.safetensors")
    tokens, positions = torch.arange(16)[None], torch.arange(16)[None]
    with torch.no_grad():
        loaded = load_decoder(tmp_path)
        assert torch.equal(loaded(tokens, positions, None), decoder(tokens, positions, None))


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=r"a folder with config\.json"):
        load_decoder(tmp_path)
