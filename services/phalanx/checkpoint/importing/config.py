"""What the config.json of a source says otherwise than the job. Pure."""

from __future__ import annotations

from typing import Any

from phalanx.checkpoint.importing.source import Source
from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs
from phalanx.models.hugging_face import config_from_hugging_face


def config_problems(source: Source, args: DecoderArgs) -> list[PhalanxError]:
    """Every key of config.json that says another model than the job's."""
    if source.config is None:
        if source.kind != "hugging-face":
            return []
        missing = PhalanxError(
            f"{source.url}/config.json", expected="the configuration of the model", remedy="copy it beside the weights"
        )
        return [missing]
    try:
        theirs = config_from_hugging_face(source.config, f"{source.url}/config.json")
    except Problems as error:
        return list(error.problems)
    names: list[str] = list(DecoderArgs.__dataclass_fields__)
    pairs: list[tuple[str, Any, Any]] = [(name, getattr(theirs, name), getattr(args, name)) for name in names]
    return [
        PhalanxError(
            f"[model.args] {name}",
            value=ours,
            expected=f"{there!r} as config.json has it",
            remedy=f"set model.args.{name}={str(there).lower() if isinstance(there, bool) else there}",
        )
        for name, there, ours in pairs
        if there != ours
    ]
