"""What a job runs of the user's own beside the model: `[code]`, where it lies, and `[loss]`; and the form in which the
job file names a class or a function."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from phalanx.spec.keys import Mark, Section, key, wrong

OWN_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
OWN_FORM = "package.module:name"
OwnName = Annotated[str, Field(pattern=OWN_PATTERN)]


def require_json(value: Any) -> None:
    """Raises PydanticCustomError unless the arguments of something of the user's own can be written down as JSON."""
    if not _is_json(value):
        raise wrong("texts, finite numbers, true, false, lists and tables of them", "write dates and times as text")


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return isinstance(value, str | bool | int) or (isinstance(value, float) and value - value == 0)


class Code(Section):
    """Your own code: a folder that is packed as it is when the job starts, kept in the job's storage and unpacked on
    every node, first on the import path. Left out, ranks import what is installed where they run."""

    path: str | None = key(
        Mark.FREE, "Folder to pack; a relative one starts at the folder of the job file.", None, min_length=1
    )
    digest: str | None = key(
        Mark.PLACEMENT,
        "Digest of packed code in the job's storage; it is filled in when `code.path` is packed.",
        None,
        pattern=r"^sha256:[0-9a-f]{64}$",
    )
    on_change: Literal["keep", "take", "refuse"] = key(
        Mark.FREE,
        "What a job that goes on does where the folder is another than the one that its newest attempt was started "
        "with: keep that one and say so, take the new one, or refuse to start.",
        "keep",
    )


class Loss(Section):
    """What is minimised: cross-entropy over the vocabulary, or a function of your own, which gives the sum over the
    tokens of a micro-batch; the sums of all are divided by the tokens that count."""

    fn: str | None = key(
        Mark.IDENTITY,
        "Your own loss as `package.module:function`, called with logits, targets and `loss.args`.",
        None,
        pattern=OWN_PATTERN,
    )
    args: dict[str, Any] = key(Mark.IDENTITY, "Keyword arguments of `loss.fn`.", {})
    chunk_tokens: int = key(
        Mark.FREE,
        "Tokens whose logits exist at a time: the head and the cross-entropy go through a micro-batch in chunks of so "
        "many, and backward computes their logits again. 0: logits of a micro-batch are whole.",
        0,
        unit="tokens",
        ge=0,
    )

    z_loss: float = key(
        Mark.IDENTITY,
        "Coefficient of the z-loss, which is minimised beside the cross-entropy: times the mean over tokens of "
        "log^2 Z, Z the sum of exp(logits) (PaLM took 1e-4). It is not part of the loss that is told. 0: none.",
        0.0,
        ge=0,
    )

    @field_validator("args")
    @classmethod
    def _args_are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        require_json(value)
        return value
