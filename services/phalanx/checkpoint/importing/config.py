"""What the config.json of a source says otherwise than the job. Pure."""

from __future__ import annotations

from typing import Any, Final

from phalanx.checkpoint.importing.source import Source
from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs
from phalanx.models.hugging_face import config_from_hugging_face

# How experts are balanced, which says nothing of what weights mean.
_OF_TRAINING: Final = frozenset({"moe.aux_loss", "moe.bias_update_rate"})


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
    there, here = theirs.by_key(), args.by_key()
    return [
        _differs(name, here.get(name), there.get(name))
        for name in {**there, **here}
        if there.get(name) != here.get(name) and name not in _OF_TRAINING
    ]


def _differs(name: str, here: Any, there: Any) -> PhalanxError:
    """A key that config.json has otherwise than the job; None: not at all."""
    key = f"model.args.{name}"
    return PhalanxError(
        f"[model.args] {name}",
        value=here,
        expected="none, as config.json has it" if there is None else f"{there!r} as config.json has it",
        remedy=f"remove {key}"
        if there is None
        else f"set {key}={str(there).lower() if isinstance(there, bool) else there}",
    )
