"""Special tokens are no text: whatever a document says, it does not become one of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

_NEVER_IN_TEXT = "\0"  # the rules remove it
_PARTS_OF_WORDS = ("'r", "'v", "'l")  # of 're, 've and 'll, which the byte-level rule keeps together


def can_be_learnt(token: str) -> bool:
    """Whether a byte-level BPE may make `token` of text while it is trained: it merges bytes within a word."""
    if not set(token) <= set(pre_tokenizers.ByteLevel.alphabet()):
        return False
    text = str(decoders.ByteLevel().decode([token]))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return "\ufffd" in text or len(words) == 1 or text in _PARTS_OF_WORDS


def is_spelled(encoder: Tokenizer, texts: Iterable[str], token_id: int) -> bool:
    """Whether one of the texts becomes a token."""
    return any(token_id in _ids(encoder, text) for text in texts)


def unspelled(tokenizer: Tokenizer, eos_token: str) -> Tokenizer:
    """A tokenizer of the same ids in which special tokens, and an added `eos_token`, are not found in text.

    Models that look words up in their vocabulary (Unigram, WordLevel) find special tokens there too, so these are given
    names that no text has. Not the one for the unknown, which the model needs; nor what a BPE merges: it stays.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {each.content: token_id for token_id, each in added.items() if each.special or each.content == eos_token}
    spelled = {content for content, token_id in special.items() if token_id in _ids(tokenizer, content)}
    if not spelled:
        return tokenizer
    parsed = json.loads(tokenizer.to_str())
    hidden = _hide(parsed["model"], spelled)
    kept = [each for each in parsed["added_tokens"] if each["content"] not in hidden]
    parsed["added_tokens"] = [each | {"special": True} if each["content"] in spelled else each for each in kept]
    parsed["post_processor"] = None  # it may name hidden tokens, and adds only what we don't ask for
    result = Tokenizer.from_str(json.dumps(parsed))
    result.encode_special_tokens = True
    return result


def _hide(model: dict[str, Any], spelled: set[str]) -> set[str]:
    """Renames those of `spelled` in a model's vocabulary that it can do without; which these are."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        needed = {vocab[model["unk_id"]][0]} if model.get("unk_id") is not None else set()
        hidden = spelled.intersection(piece for piece, _ in vocab) - needed
        model["vocab"] = [[_NEVER_IN_TEXT + piece if piece in hidden else piece, score] for piece, score in vocab]
        return hidden
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges", ())]
    needed = {model.get("unk_token")}.union(*merges, ("".join(pair) for pair in merges))
    hidden = spelled.intersection(vocab) - needed
    model["vocab"] = {_NEVER_IN_TEXT + word if word in hidden else word: number for word, number in vocab.items()}
    return hidden


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except Exception:  # noqa: BLE001 - the library raises bare Exception for text that it has no tokens for
        return []
