"""From raw tables to a checked job; every mistake is found in one go and told in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec.checks import findings_of
from phalanx.spec.finding import Finding
from phalanx.spec.foreign import NO_EQUIVALENT
from phalanx.spec.job import Job
from phalanx.spec.keys import bound_text
from phalanx.spec.names import UnknownKey, all_keys, key_at, unknown_key
from phalanx.spec.presets import PRESETS
from phalanx.spec.source import apply_overrides, read_toml


def load_job(
    path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None, *, check_world: bool = False
) -> Job:
    """Reads, overrides and checks a job file (see `parse_job`). A relative `code.path` starts at the file's folder.
    Raises PhalanxError or Problems.
    """
    raw = apply_overrides(read_toml(path), overrides)
    job = parse_job(raw, world_size, check_world=check_world, where=str(path))
    if job.code.path is None:
        return job
    code = job.code.model_copy(update={"path": str((Path(path).parent / Path(job.code.path).expanduser()).absolute())})
    return job.model_copy(update={"code": code})


def parse_job(
    raw: Mapping[str, Any], world_size: int | None = None, *, check_world: bool = False, where: str = "job file"
) -> Job:
    """A checked job out of raw tables. Raises Problems with every mistake: unknown keys, wrong values, broken rules.

    world_size: check the layout for it too. check_world: check it for the size of `[cluster]` where no world_size is
    given.
    """
    tables = deepcopy(dict(raw))
    try:
        job = Job.model_validate(tables)
    except ValidationError as error:
        raise Problems(where, _explain(tables, error.errors(include_url=False), world_size, check_world)) from None
    broken = _broken(job, world_size, check_world)
    if broken:
        raise Problems(where, [finding.problem for finding in broken])
    return job


def _broken(job: Job, world_size: int | None, check_world: bool) -> list[Finding]:
    return findings_of(job, job.cluster.world_size if check_world and world_size is None else world_size)


def _explain(
    tables: dict[str, Any], errors: list[ErrorDetails], world_size: int | None, check_world: bool
) -> list[PhalanxError]:
    """The problems behind `errors`, and rules that are broken once wrong keys are gone and misspelt ones in place."""
    unknown = [found for error in errors if error["type"] == "extra_forbidden" for found in _unknown(error)]
    if "model.class" in {_dotted(error) for error in errors} | {found.meant for found in unknown}:
        # Then [model.args] are a class's own, which nothing here knows.
        errors = [error for error in errors if not _dotted(error).startswith("model.args")]
        unknown = [found for found in unknown if not found.name.startswith("model.args.")]
    meant = {found.meant for found in unknown if found.meant is not None}
    wrong = {_dotted(error) for error in errors} | meant
    problems = [found.problem for found in unknown]
    given = {_dotted(error): error["input"] for error in errors}
    for error in errors:
        name, kind = _dotted(error), error["type"]
        follows = kind == "missing" and (name in meant or ("model.preset" in wrong and name.startswith("model.args.")))
        follows |= any(derived == name and given.get(source) == error["input"] for source, derived in _DERIVED)
        if kind != "extra_forbidden" and not follows:
            problems.append(_problem(error, name))
        _take(tables, error["loc"])
    for found in unknown:
        if found.meant is not None and "NAME" not in found.meant:
            _put(tables, found.meant, found.value)
    job, stand_ins = _mended(tables)
    suspects = wrong | stand_ins
    suspects |= {derived for name, derived in _DERIVED if name in suspects}
    if wrong & {"model.preset", "model.class"}:
        suspects |= {each.name for each in all_keys() if each.name.startswith("model.args.")}
    broken = _broken(job, world_size, check_world) if job is not None else []
    return problems + [finding.problem for finding in broken if not suspects.intersection(finding.keys)]


# Keys whose default comes from another key: a rule over them says nothing while that one is wrong.
_DERIVED = (
    ("model.args.n_heads", "model.args.n_kv_heads"),
    ("training.steps", "lr_scheduler.total_steps"),
    ("parallel.schedule", "parallel.stages_per_rank"),
)
_STAND_INS: Mapping[str, str] = {"job.name": "x", "job.storage": "memory://x", "data.train": "memory://x"}


def _mended(tables: dict[str, Any]) -> tuple[Job | None, set[str]]:
    """A job with something standing in for each missing key, and the names of those: no rule over them is believed."""
    try:
        return Job.model_validate(tables), set()
    except ValidationError as error:
        missing = {_dotted(each) for each in error.errors(include_url=False) if each["type"] == "missing"}
    for name in missing:
        _put(tables, name, _STAND_INS.get(name, 1))
    try:
        return Job.model_validate(tables), missing
    except ValidationError:
        return None, missing


def _dotted(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"])


def _unknown(error: ErrorDetails) -> Iterator[UnknownKey]:
    """One answer a key, also for each key inside an unknown table."""
    for name, value in _leaves(_dotted(error), error["input"]):
        yield unknown_key(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and name.lower() not in NO_EQUIVALENT:
        for part, below in value.items():
            yield from _leaves(f"{name}.{part}", below)
    else:
        yield name, None if isinstance(value, dict) else value


def _take(tables: dict[str, Any], path: tuple[int | str, ...]) -> None:
    table: Any = tables
    for part in path[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(path[-1], None)


def _put(tables: dict[str, Any], name: str, value: Any) -> None:
    """Puts a value where it was meant to stand, unless something stands there."""
    *sections, leaf = name.split(".")
    table: Any = tables
    for part in sections:
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.setdefault(leaf, value)


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "dict_type": "a table",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_PATTERNS = {
    "model.class": "package.module:Class",
    "code.digest": "sha256: and 64 hexadecimal digits",
    "loss.fn": "package.module:function",
    "optimizer.class": "package.module:Class",
    "metrics.fn": "package.module:function",
    "job.name": "lower-case letters, digits, `-`, `_` and `.`, at most 63",
    "job.project": "lower-case letters, digits, `-`, `_` and `.`, at most 63",
    "data.train_digest": "sha256: and 64 hexadecimal digits",
    "data.held_out_digest": "sha256: and 64 hexadecimal digits",
    "data.sources.NAME.digest": "sha256: and 64 hexadecimal digits",
    "parallel.stage_split": "cost, even, or layers of each stage as 9,9,8,6",
    "storage.NAME.endpoint": "a URL: https://host:port",
    "cluster.network.interfaces": "names of interfaces as eth0,eth1, perhaps with = or ^ before the first",
    "cluster.network.transport": "IB, Socket or the name of a plugin",
    "cluster.network.ib_hca": "names of adapters as mlx5_0:1,mlx5_1:1, perhaps with = or ^ before the first",
    "cluster.network.topology_file": "an absolute path of a file",
}
_URL_FORM = "a URL: file:///absolute/folder, file://./relative/folder or s3://bucket/folder"


def _problem(error: ErrorDetails, name: str) -> PhalanxError:
    """One line for a value that its own key refuses."""
    known = key_at(name)
    about = known.description if known is not None else ""
    context, kind, value = error.get("ctx", {}), error["type"], error["input"]
    if kind == "missing":
        section = name.rpartition(".")[0]
        preset = f", or choose a preset ({', '.join(PRESETS)})" if section == "model.args" else ""
        return PhalanxError(name, expected="a value, and has none", remedy=f"set it in [{section}]{preset}: {about}")
    if kind == "phalanx":
        return PhalanxError(name, value=value, expected=context["expected"], remedy=context["remedy"])
    if kind == "string_pattern_mismatch":
        expected = _PATTERNS.get(known.name if known is not None else name, _URL_FORM)
    elif kind == "string_too_short":
        expected = "text that is not empty"
    elif kind == "literal_error":
        expected = str(context["expected"])
    elif kind in _BOUNDS:
        expected = f"a number {_BOUNDS[kind]} {bound_text(next(iter(context.values())))}"
    else:
        expected = _KINDS.get(kind, error["msg"])
    return PhalanxError(
        name, value=value, expected=expected, remedy=f"change it: {about}" if about else f"write it as [{name}]"
    )
