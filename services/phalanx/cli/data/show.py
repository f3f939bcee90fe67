"""`phalanx data show`: what is in a dataset: its facts and recipe, or what its documents say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.config import AsJson
from phalanx.cli.data.arguments import Url, refuse
from phalanx.cli.output import print_json
from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phalanx.stream import Document, Documents

_MAX_TOKENS = 1 << 20


def register(group: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    group.command("show")(show)


def show(
    url: Url,
    count: Annotated[
        int | None, typer.Option("-n", min=1, help="Print so many documents, decoded, instead of facts.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Begin with this shard: its name or number.", show_default=False)
    ] = None,
    document: Annotated[
        str | None,
        typer.Option(
            "--document",
            metavar="ID",
            help="Print the documents of this id; with --shard: begin with the one of this number in it.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Most tokens of a document to decode.", show_default=str(_MAX_TOKENS)),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a split, or every split of a dataset, with the recipe it was made by; or decode some of its documents
    (of a dataset's training split).
    """
    if count is None and shard is None and document is None:
        refuse({"--max-tokens": max_tokens}, "the facts of a dataset")
        _show_facts(url, as_json)
    else:
        _show_documents(url, count, shard, document, max_tokens or _MAX_TOKENS, as_json)


def _show_facts(url: str, as_json: bool) -> None:
    from phalanx.data.catalog import splits_at
    from phalanx.objects import open_store

    splits = [{**found.facts(), "recipe": found.split.recipe} for found in splits_at(open_store(url))]
    if as_json:
        print_json({"url": url, "splits": splits})
        return
    for split in splits:
        for key, value in split.items():
            typer.echo(f"{key:<18} {value}")
        typer.echo("")


def _show_documents(
    url: str, count: int | None, shard: str | None, document: str | None, max_tokens: int, as_json: bool
) -> None:
    import phalanx.stream

    documents = phalanx.stream.open(url)
    if documents.tokenizer is None and not as_json:
        raise PhalanxError(
            f"{documents.split.url}/tokenizer.json",
            expected="the tokenizer of the split, in its folder or the one above",
            remedy="copy it there, or give --json to get tokens",
        )
    facts = [_facts(each, max_tokens) for each in _chosen(documents, count, shard, document)]
    if as_json:
        print_json({"url": documents.split.url, "documents": facts})
        return
    for fact in facts:
        cut = f", the first {max_tokens:,}" if fact["is_cut"] else ""
        typer.echo(f"--- {fact['id']}  {fact['shard']} document {fact['number']}  {fact['num_tokens']:,} tokens{cut}")
        typer.echo(fact["text"])


def _chosen(documents: Documents, count: int | None, shard: str | None, document: str | None) -> Sequence[Document]:
    from phalanx.stream.documents import document_numbered

    if document is not None and shard is None:
        found = documents.by_id(document)
        if not found:
            raise PhalanxError(
                "--document",
                value=document,
                expected=f"the id of a document in {documents.split.url}",
                remedy="`phalanx data show URL -n 3` shows ids; it may also lie in another split",
            )
        return found[:count]
    first = document_numbered(documents, shard or "0", _number(document))
    return documents[first.index : first.index + (count or 1)]


def _number(document: str | None) -> int | None:
    number = None if document is None else numbered(document)
    if document is None or number is not None:
        return number
    raise PhalanxError(
        "--document",
        value=document,
        expected="with --shard, the number of a document in it",
        remedy="leave out --shard to name a document by its id",
    )


def _facts(document: Document, max_tokens: int) -> dict[str, Any]:
    tokens = document.tokens[:max_tokens]
    return {
        "id": document.id,
        "index": document.index,
        "shard": document.shard_name,
        "number": document.number,
        "num_tokens": document.num_tokens,
        "is_cut": document.num_tokens > max_tokens,
        "tokens": tokens.tolist(),
        "text": document.said(0, max_tokens),
    }
