"""What an export needs besides weights: the model's configuration and names at Hugging Face, and the tokenizer of its
data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.checkpoint.export import Target
from phalanx.checkpoint.place import JobPlace
from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, open_split

_TOKENIZER = "tokenizer.json"


def hugging_face_target(place: JobPlace, tokenizer: Path | None) -> Target:
    """The target for a job with the built-in decoder.

    The tokenizer is the file `tokenizer`, or the one beside the training split, checked against the digest that the
    split names. Raises PhalanxError for a model of the user's own and where no fitting tokenizer is found.
    """
    record = place.lineage.read_job()
    if record is None:
        raise PhalanxError(
            "job.json", expected="the record of a created job", remedy="start the job with `phalanx run` first"
        )
    model = record.identity["model"]
    if model.get("class") is not None:
        raise PhalanxError(
            "model.class",
            value=model["class"],
            expected="the built-in decoder, whose names at Hugging Face are known",
            remedy="convert your own model with phalanx.snapshot.load",
        )
    seq_len = int(record.identity["training"]["seq_len"])
    split = _training_split(place)
    data = _tokenizer(place, tokenizer)
    files, token_ids = tokenizer_files(data, split, seq_len)
    config, name_of = _llama(model["args"], seq_len)
    return Target({**config, **token_ids}, name_of, files)


def _llama(args: Mapping[str, Any], seq_len: int) -> tuple[dict[str, Any], Callable[[str], str | None]]:
    """config.json of the decoder of shape `args`, and the names of its parameters; a tied head is stored once."""
    from phalanx.models.args import DecoderArgs
    from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face

    if args.get("moe") is not None:
        raise PhalanxError(
            "model.args.moe",
            expected="a dense model, whose form at Hugging Face is Llama's",
            remedy="convert it with phalanx.snapshot.load",
        )
    shape = DecoderArgs(**{name: args[name] for name in DecoderArgs.__dataclass_fields__})

    def name_of(name: str) -> str | None:
        return None if shape.tie_embeddings and name == "output.weight" else name_to_hugging_face(name)

    return config_to_hugging_face(shape, max_position_embeddings=seq_len), name_of


def tokenizer_files(data: bytes, split: Split | None, seq_len: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """tokenizer.json and the files that tell transformers how to use it; and the token ids that config.json repeats."""
    if split is not None and sha256(data) != split.tokenizer_digest:
        raise PhalanxError(
            "tokenizer.json",
            value=sha256(data),
            expected=f"the tokenizer of the training data, {split.tokenizer_digest}",
            remedy="give the tokenizer.json that the data was prepared with as --tokenizer",
        )
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len}
    settings["clean_up_tokenization_spaces"] = False
    special: dict[str, str] = {}
    token_ids: dict[str, int] = {}
    if split is not None:
        special["eos_token"] = _token(data, split.eos_id)
        token_ids = {"eos_token_id": split.eos_id}
    texts = {"tokenizer_config.json": {**settings, **special}, "special_tokens_map.json": special}
    files = {name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in texts.items()}
    return {_TOKENIZER: data, **files}, token_ids


def _token(data: bytes, token_id: int) -> str:
    """The text of a token that the split's manifest promises to exist."""
    token = Tokenizer.from_str(data.decode()).id_to_token(token_id)
    assert token is not None, f"the tokenizer has no token {token_id}"
    return str(token)


def _training_split(place: JobPlace) -> Split | None:
    """The training split if it can still be reached by the URL that the job knows."""
    url = place.train_url
    if url is None:
        return None
    store = place.open(url)
    return open_split(store) if _read_if_there(store, "manifest.json") is not None else None


def _tokenizer(place: JobPlace, named: Path | None) -> bytes:
    """The file `named`, or tokenizer.json in the split's folder or the one above, which a dataset's splits share."""
    url = place.train_url
    if named is not None and named.is_file():
        return named.read_bytes()
    if named is None and url is not None:
        for folder in (url.rstrip("/"), url.rstrip("/").rpartition("/")[0]):
            data = _read_if_there(place.open(folder), _TOKENIZER)
            if data is not None:
                return data
    where = str(named) if named is not None else f"tokenizer.json beside {url}"
    raise PhalanxError(where, expected="a tokenizer.json file", remedy="give the tokenizer's file as --tokenizer")


def _read_if_there(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.read(key)
    except ObjectMissing:
        return None
