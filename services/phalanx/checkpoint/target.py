"""What an export needs besides weights: the model's configuration and names at Hugging Face, and the tokenizer of its
data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from phalanx.checkpoint.export import Target
from phalanx.checkpoint.place import JobPlace
from phalanx.core.digest import sha256
from phalanx.core.errors import PhalanxError
from phalanx.lineage import JobRecord
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import open_split

_TOKENIZER = "tokenizer.json"


def hugging_face_target(place: JobPlace, tokenizer: Path | None) -> Target:
    """The target for a job with the built-in decoder.

    The tokenizer is the file `tokenizer`, or the one beside the training split, checked against the digest that the job
    was created with. Raises PhalanxError for a model of the user's own and where no fitting tokenizer is found.
    """
    record = place.lineage.read_job()
    if record is None:
        raise _no_job(place)
    model = record.identity["model"]
    if model.get("class") is not None:
        raise PhalanxError(
            "model.class",
            value=model["class"],
            expected="the built-in decoder, whose names at Hugging Face are known",
            remedy="convert your own model with phalanx.snapshot.load",
        )
    seq_len = int(record.identity["training"]["seq_len"])
    files, token_ids = tokenizer_files(_tokenizer(place, tokenizer), _trained_with(place, record), seq_len)
    config, name_of = _decoder(model["args"], seq_len)
    return Target({**config, **token_ids}, name_of, files)


def _no_job(place: JobPlace) -> PhalanxError:
    """Why a place without a job's record cannot be exported."""
    if place.lineage.checkpoints():
        return PhalanxError(
            f"job at {place.store.url}",
            expected="a job of `phalanx run`, whose record says which decoder it trains; another program saved these "
            "checkpoints",
            remedy="read them with phalanx.snapshot.load(URL) and write what you need",
        )
    return PhalanxError(
        "job.json", expected="the record of a created job", remedy="start the job with `phalanx run` first"
    )


def _decoder(args: Mapping[str, Any], seq_len: int) -> tuple[dict[str, Any], Callable[[str], str | None]]:
    """config.json of the decoder of shape `args`, and the names of its parameters; a tied head is stored once."""
    from phalanx.models.args import DecoderArgs
    from phalanx.models.hugging_face import config_to_hugging_face, name_to_hugging_face

    shape = DecoderArgs.of_plain(args)

    config = config_to_hugging_face(shape, max_position_embeddings=seq_len)

    def name_of(name: str) -> str | None:
        is_tied = shape.tie_embeddings and name == "output.weight"
        return None if is_tied else name_to_hugging_face(name, config["model_type"])

    return config, name_of


@dataclass(frozen=True, slots=True)
class TrainedWith:
    """The tokenizer of a job's data: SHA-256 of its tokenizer.json, and the id that ends every document."""

    digest: str
    eos_id: int


def tokenizer_files(data: bytes, trained_with: TrainedWith, seq_len: int) -> tuple[dict[str, bytes], dict[str, int]]:
    """tokenizer.json and the files that tell transformers how to use it; and the token ids that config.json repeats.

    Raises PhalanxError where `data` is not the tokenizer that the job was trained with.
    """
    if sha256(data) != trained_with.digest:
        raise PhalanxError(
            "tokenizer.json",
            value=sha256(data),
            expected=f"the tokenizer of the training data, {trained_with.digest}",
            remedy="give the tokenizer.json that the data was prepared with as --tokenizer",
        )
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq_len}
    settings["clean_up_tokenization_spaces"] = False
    special = {"eos_token": _token(data, trained_with.eos_id)}
    texts = {"tokenizer_config.json": {**settings, **special}, "special_tokens_map.json": special}
    files = {name: (json.dumps(value, indent=2, sort_keys=True) + "\n").encode() for name, value in texts.items()}
    return {_TOKENIZER: data, **files}, {"eos_token_id": trained_with.eos_id}


def _token(data: bytes, token_id: int) -> str:
    """The text of a token that the data's manifest promises to exist; PhalanxError where it does not."""
    try:
        token = Tokenizer.from_str(data.decode()).id_to_token(token_id)
    except Exception as error:  # the library raises nothing narrower
        raise _no_tokenizer(str(error), "the JSON of a tokenizer, as the tokenizers library writes it") from error
    if token is None:
        raise _no_tokenizer(f"a vocabulary without {token_id}", f"one with token {token_id}, which ends a text")
    return str(token)


def _no_tokenizer(value: str, expected: str) -> PhalanxError:
    return PhalanxError(
        _TOKENIZER,
        value=value,
        expected=expected,
        remedy="prepare the data with a tokenizer.json that opens, or read the weights with phalanx.snapshot.load",
    )


def _trained_with(place: JobPlace, record: JobRecord) -> TrainedWith:
    """What the job's record says of its tokenizer; a record without it leaves the training split to ask."""
    kept = record.identity.get("tokenizer")
    if kept is not None:
        return TrainedWith(str(kept["digest"]), int(kept["eos_id"]))
    url = place.train_url
    if url is None:
        raise _no_split("data.train")
    try:
        digests = record.identity.get("data_digests", {})
        split = open_split(place.open(url), digests[min(digests)] if digests else None)
    except PhalanxError as error:
        raise _no_split(url) from error
    return TrainedWith(split.tokenizer_digest, split.eos_id)


def _no_split(where: str) -> PhalanxError:
    return PhalanxError(
        where,
        expected="the training data, since the job's record is too old to name its tokenizer",
        remedy="bring the split back, or name where it is now as --set data.train=URL with the job file",
    )


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
