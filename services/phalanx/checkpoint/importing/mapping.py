"""Which tensor of a source becomes which tensor of the checkpoint, and everything that stands against it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.importing.config import config_problems
from phalanx.checkpoint.importing.listing import MOST_LISTED, lacking, listed, pattern_of, titled
from phalanx.checkpoint.importing.parameters import (
    BEGIN_ANEW,
    HEADS,
    MOMENTS,
    STATE,
    Meaning,
    is_counter,
    is_optimizer,
    is_setting,
    meaning_of,
    shapes_of,
)
from phalanx.checkpoint.importing.source import Source, SourceTensor
from phalanx.core.errors import PhalanxError, Problems
from phalanx.models.args import DecoderArgs
from phalanx.models.hugging_face_deepseek import is_predicting, num_predicting

Rotary = Literal["half", "interleaved"]
_OUTPUT = "output.weight"
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the checkpoint, fp32. source: whose values it has; None: zeros. head_dim: where given, the rows of
    each head of that many are reordered, from pairs that lie side by side to pairs of halves.
    """

    name: str
    shape: tuple[int, ...]
    source: SourceTensor | None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """An import as it will be. steps: tensors that hold the number of updates, to be read. left_out: names of the
    source that are not used. same: pairs that must hold the same values, of which one is used. counts: numbers of
    updates that are no tensors, by name.
    """

    tensors: tuple[MappedTensor, ...]
    steps: tuple[SourceTensor, ...]
    left_out: tuple[str, ...]
    same: tuple[tuple[SourceTensor, SourceTensor], ...]
    rotary: Rotary
    with_optimizer: bool
    counts: Mapping[str, float]


def planned(
    source: Source,
    args: DecoderArgs,
    *,
    rotary: Rotary | None = None,
    with_optimizer: bool = True,
    leave_out: Collection[str] = (),
) -> ImportPlan:
    """The tensors of a checkpoint of the decoder `args`, from those of `source`.

    rotary: how the source pairs the elements of a head; None: as its names say. with_optimizer: False begins with an
    optimizer's zeros. leave_out: names of the source that are not needed, each spelt out.
    Raises Problems that list everything that is missing, unknown, of another shape or type, or configured otherwise.
    """
    shapes = shapes_of(args)
    predicting = {n for n in source.tensors if is_predicting(n, args.n_layers, num_predicting(source.config))}
    found = _Found(source, frozenset({*shapes, _OUTPUT}), with_optimizer, set(leave_out), predicting)
    problems = [*config_problems(source, args), *found.problems]
    pairing, rotary_problems = _rotary_of_latents(rotary) if args.mla else _rotary(source, found, rotary)
    problems += rotary_problems
    if with_optimizer and not any(is_optimizer(name) for name in source.tensors):
        problems.append(
            PhalanxError(
                source.url,
                expected="the state of an optimizer (optimizer.state.<parameter>.exp_avg, exp_avg_sq, step)",
                remedy=BEGIN_ANEW,
            )
        )
        with_optimizer = False
    parts = ("model", *MOMENTS) if with_optimizer else ("model",)
    problems += found.missing(shapes, with_optimizer=with_optimizer)
    problems += found.mismatches(shapes)
    if problems:
        raise Problems(source.url, problems)
    heads = args.head_dim if pairing == "interleaved" and args.mla is None else None
    tensors = [
        MappedTensor(
            f"model.{name}" if part == "model" else f"optim.{name}.{part}",
            shape,
            found.by_meaning.get((name, part)) if part in parts else None,
            heads if HEADS.fullmatch(name) else None,
        )
        for part in ("model", *MOMENTS)
        for name, shape in shapes.items()
    ]
    steps = tuple(tensor for (_, part), tensor in found.by_meaning.items() if part == "step" and with_optimizer)
    counts = {name: source.numbers[name] for name in found.counters.values()} if with_optimizer else {}
    return ImportPlan(tuple(tensors), steps, found.left_out(args), found.same(args), pairing, with_optimizer, counts)


class _Found:
    """What the names of a source mean. predicting: those of layers behind the decoder's."""

    def __init__(
        self,
        source: Source,
        known: frozenset[str],
        with_optimizer: bool,
        leave_out: set[str],
        predicting: set[str],
    ) -> None:
        self._source = source
        self.by_meaning: dict[tuple[str, str], SourceTensor] = {}
        self.counters: dict[str, str] = {}  # of a parameter: the name of its number of updates
        self.hugging_face: set[bool] = set()
        self.problems: list[PhalanxError] = []
        self._unused = [name for name in source.others if is_setting(name)]
        for name in sorted(leave_out - {*source.tensors, *source.others, *source.numbers}):
            self.problems.append(
                PhalanxError("--leave-out", value=name, expected="a name of the source", remedy="see --dry-run")
            )
        unused_counters = [] if with_optimizer else [name for name in source.others if is_counter(name)]
        self._unused += unused_counters
        unknown = [name for name in source.others if not is_setting(name) and name not in set(unused_counters)]
        unneeded = leave_out | predicting
        for name, tensor in source.tensors.items():
            meaning = meaning_of(name, known)
            if name in unneeded or is_setting(name) or (is_optimizer(name) and not with_optimizer):
                self._unused.append(name)
            elif meaning is None:
                unknown.append(name)
            else:
                self._take(meaning, tensor)
        for name in source.numbers:
            meaning = meaning_of(name, known)
            if name in leave_out or not with_optimizer:
                self._unused.append(name)
            elif meaning is None:
                unknown.append(name)
            else:
                self.counters[meaning.parameter] = name
        self._unused += [name for name in unknown if name in leave_out]
        others: dict[str, list[str]] = {}
        for name in sorted(name for name in unknown if name not in leave_out):
            others.setdefault(pattern_of(name), []).append(name)
        self.problems += map(_unknown, others.values())

    def _take(self, meaning: Meaning, tensor: SourceTensor) -> None:
        key = (meaning.parameter, meaning.part)
        if key in self.by_meaning:
            self.problems.append(
                PhalanxError(
                    tensor.name,
                    expected=f"one tensor for {meaning.parameter}, but {self.by_meaning[key].name} is it too",
                    remedy="choose by --leave-out NAME",
                )
            )
            return
        self.by_meaning[key] = tensor
        self.hugging_face.add(meaning.hugging_face)

    def missing(self, shapes: Mapping[str, tuple[int, ...]], *, with_optimizer: bool) -> Iterator[PhalanxError]:
        """What the source has no tensor for: a line of weights, a line of the optimizer's state."""
        weights = {name: ("model",) for name in shapes if (name, "model") not in self.by_meaning}
        if weights:
            named = lacking(weights, ("model",), shapes)
            yield PhalanxError(
                named[0] if len(named) == 1 else "weights",
                expected="a tensor for it in the source"
                if len(weights) == 1
                else f"a tensor for each in the source, which has none for {len(weights)} of {len(shapes)}: "
                f"{listed(named)}",
                remedy="import from a folder that has all, or correct the job's [model]",
            )
        state = {name: tuple(part for part in STATE if not self._has(name, part)) for name in shapes}
        num_lacking = sum(map(len, state.values()))
        if num_lacking and with_optimizer:
            yield PhalanxError(
                "optimizer state",
                expected=f"{', '.join(STATE)} of each parameter in the source, which lacks {num_lacking} of "
                f"{len(STATE) * len(shapes)}: {listed(lacking(state, STATE, shapes))}",
                remedy=f"import from a folder that has all, or {BEGIN_ANEW}",
            )

    def _has(self, name: str, part: str) -> bool:
        return (name, part) in self.by_meaning or (part == "step" and name in self.counters)

    def mismatches(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[PhalanxError]:
        """Tensors of another shape or type than the decoder's, those of one pattern in one line."""
        shaped: dict[tuple[str, str, str], list[str]] = {}
        typed: dict[tuple[str, str], list[str]] = {}
        for (name, part), tensor in self.by_meaning.items():
            shape = () if part == "step" else shapes.get(name, tensor.shape)
            if tensor.shape != shape:
                value = f"{tensor.dtype} {list(tensor.shape)}"
                key = value, f"the shape {list(shape)} of {pattern_of(name)}", pattern_of(tensor.name)
                shaped.setdefault(key, []).append(tensor.name)
            if part != "step" and tensor.dtype not in _FLOATS:
                typed.setdefault((tensor.dtype, pattern_of(tensor.name)), []).append(tensor.name)
        for (value, expected, _), names in shaped.items():
            yield PhalanxError(
                titled(names),
                value=value,
                expected=f"{expected}, by the job's [model]",
                remedy="correct [model.args], or import another source",
            )
        for (dtype, _), names in typed.items():
            yield PhalanxError(
                titled(names),
                value=dtype,
                expected=f"one of {', '.join(_FLOATS)}",
                remedy="save it in one of these types",
            )

    def left_out(self, args: DecoderArgs) -> tuple[str, ...]:
        """Names of the source that the import doesn't use."""
        tied = [t.name for (name, _), t in self.by_meaning.items() if args.tie_embeddings and name == _OUTPUT]
        return tuple(sorted(self._unused + tied))

    def same(self, args: DecoderArgs) -> tuple[tuple[SourceTensor, SourceTensor], ...]:
        """A tied head that the source stores too must be the embedding."""
        head, table = (self.by_meaning.get((name, "model")) for name in (_OUTPUT, "tok_embeddings.weight"))
        return ((head, table),) if args.tie_embeddings and head is not None and table is not None else ()


def _unknown(names: Sequence[str]) -> PhalanxError:
    """What to raise for names of one pattern that mean nothing here."""
    options = " ".join(f"--leave-out {name}" for name in names[:MOST_LISTED])
    more = f" and so on, {len(names)} in all" if len(names) > MOST_LISTED else ""
    return PhalanxError(
        titled(names),
        expected="a name of the built-in decoder, as torchtitan, Hugging Face's Llama and Qwen or Phalanx has it",
        remedy=f"if the model can do without it: {options}{more}",
    )


def _rotary_of_latents(given: Rotary | None) -> tuple[Rotary, list[PhalanxError]]:
    """Latent attention pairs neighbours, here as in DeepSeek's own code and in transformers."""
    if given != "half":
        return "interleaved", []
    wrong = PhalanxError(
        "--rotary", value=given, expected="interleaved: latent attention pairs neighbours", remedy="leave it out"
    )
    return "interleaved", [wrong]


def _rotary(source: Source, found: _Found, given: Rotary | None) -> tuple[Rotary, list[PhalanxError]]:
    """How the source pairs the elements of a head: Hugging Face's names say so, others' don't."""
    if found.hugging_face == {True}:
        if given == "interleaved":
            wrong = PhalanxError(
                "--rotary",
                value=given,
                expected="half: Hugging Face's models pair the halves of a head, by their names",
                remedy="leave it out",
            )
            return "half", [wrong]
        return "half", []
    if given is None:
        missing = PhalanxError(
            "--rotary",
            expected="how the source pairs the elements of a head, which its names don't say: interleaved (torchtitan, "
            "Meta's Llama) or half (Phalanx, Hugging Face)",
            remedy="give --rotary interleaved or --rotary half",
        )
        return "half", [missing]
    return given, []
