"""Samples text from an exported Hugging Face folder with the built-in decoder, on one process: a look at what was
learnt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from phalanx.core.errors import PhalanxError
from phalanx.core.philox import key_of, philox4x32
from phalanx.models.decoder import Decoder
from phalanx.models.hugging_face import config_from_hugging_face, name_from_hugging_face


def load_decoder(folder: Path) -> Decoder:
    """The decoder of an exported folder, in fp32. Raises PhalanxError where the folder is no export of one."""
    if not (folder / "config.json").is_file():
        raise PhalanxError(
            str(folder), expected="a folder with config.json", remedy="make one with `phalanx checkpoint export`"
        )
    model = Decoder(config_from_hugging_face(json.loads((folder / "config.json").read_text())))
    weights = {
        name_from_hugging_face(name): tensor.float()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    if model.args.tie_embeddings:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def sample_texts(
    folder: Path, prompts: Sequence[str], *, num_tokens: int, seed: int, temperature: float = 0.8
) -> list[str]:
    """Each prompt continued by `num_tokens` tokens; the same seed gives the same texts."""
    model, tokenizer = load_decoder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = []
    for line, prompt in enumerate(prompts):
        ids = list(tokenizer.encode(prompt).ids)
        for place in range(num_tokens):
            tokens = torch.tensor([ids])
            logits = model(tokens, torch.arange(len(ids))[None], None)[0, -1].double()
            ids.append(int(torch.argmax(logits / temperature + _gumbel(len(logits), seed, line, place))))
        texts.append(tokenizer.decode(ids))
    return texts


def _gumbel(count: int, seed: int, line: int, place: int) -> torch.Tensor:
    """Gumbel noise [count], which turns an argmax into a draw (Gumbel, 1954; "Gumbel-max trick")."""
    zero = torch.zeros(count, dtype=torch.int64)
    word, _, _, _ = philox4x32((torch.arange(count), zero + place, zero + line, zero), key_of(seed, "sample"))
    uniform = (word.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))
