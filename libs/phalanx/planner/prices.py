"""Prices and power of GPUs: a file with a date and an origin for each figure, and the user's own over it."""

from __future__ import annotations

import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from phalanx.core.errors import PhalanxError
from phalanx.planner.gpus import GPUS

_DEFAULT_FILE = "prices.toml"
_MOST_USD_PER_HOUR, _MOST_WATTS = 1e6, 1e6
# What each key holds, for people.
_EXPECTED = {
    "usd_per_hour": f"two numbers from 0 to {_MOST_USD_PER_HOUR:,.0f}, US dollars for one GPU, the lowest price first",
    "watts": f"a number above 0, at most {_MOST_WATTS:,.0f}",
    "as_of": 'a date as text, such as "2026-11"',
    "origin": "text that says where the figures are from",
    "host_watts_per_gpu_watt": "a number from 0 to 100",
    "pue": "a number from 1 to 100",
}
# Text that looks like a number, true and false are no numbers.
_Number = Annotated[float, Field(strict=True)]
_Usd = Annotated[_Number, Field(ge=0, le=_MOST_USD_PER_HOUR)]


class GpuPrice(BaseModel):
    """One kind of GPU. usd_per_hour: lowest and highest for one GPU. watts: of one GPU under load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    usd_per_hour: tuple[_Usd, _Usd]
    watts: _Number = Field(gt=0, le=_MOST_WATTS)
    as_of: str = Field(min_length=4)
    origin: str = Field(min_length=1)

    @field_validator("usd_per_hour")
    @classmethod
    def _in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] > value[1]:
            raise ValueError("the lowest price first, then the highest")
        return value

    @property
    def middle(self) -> float:
        """US dollars an hour between the two."""
        return sum(self.usd_per_hour) / 2


class Site(BaseModel):
    """What a data centre adds. host_watts_per_gpu_watt: hosts and network. pue: all power by that of the machines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_watts_per_gpu_watt: _Number = Field(ge=0, le=100)
    pue: _Number = Field(ge=1, le=100)


class Prices(BaseModel):
    """A price file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    site: Site
    gpu: dict[str, GpuPrice]

    def of(self, kind: str) -> GpuPrice:
        """The price of a kind by its name (H100, H100-80, ...). Raises PhalanxError where the file has none."""
        short = kind.upper().split("-")[0]
        if short not in self.gpu:
            raise PhalanxError(
                "prices",
                value=kind,
                expected=f"a kind that has a price: {', '.join(self.gpu)}",
                remedy=f"give one in a file of your own: [gpu.{short}] usd_per_hour, watts, as_of, origin",
            )
        return self.gpu[short]


def load_prices(path: Path | None = None) -> Prices:
    """The package's prices, with those of a TOML or JSON file over them where one is given.

    Raises PhalanxError for a file that can't be read, has unknown keys or figures that can't be.
    """
    default = tomllib.loads(files("phalanx.planner").joinpath(_DEFAULT_FILE).read_text())
    given = {} if path is None else _read(path)
    try:
        site = {**default["site"], **given.pop("site", {})}
        kinds = _by_kind(given.pop("gpu", {}), str(path))
        return Prices.model_validate({"site": site, "gpu": {**default["gpu"], **kinds}, **given})
    except ValidationError as error:
        raise _told(path, error.errors()[0]) from error
    except (AttributeError, TypeError) as error:
        raise PhalanxError(
            str(path), expected="tables [site] and [gpu.KIND]", remedy="correct the price file"
        ) from error


def _told(path: Path | None, first: ErrorDetails) -> PhalanxError:
    """What is wrong in the file, in its own words: the key, what stands there and what it holds."""
    loc, value = first["loc"], first["input"]
    if first["type"] == "missing" and isinstance(loc[-1], str):
        key = str(loc[-1])
        where, value, expected = loc[:-1], None, f"{key}: {_EXPECTED.get(key, 'a table')}"
    elif first["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"gpu": GpuPrice, "site": Site}
        table = tables.get(str(loc[0]), Prices)
        where, expected = loc, f"only the keys {', '.join(table.model_fields)}"
    else:
        key = next((str(part) for part in loc if part in _EXPECTED), "")
        where, expected = loc, _EXPECTED.get(key, f"a table with {', '.join(GpuPrice.model_fields)}")
    return PhalanxError(
        f"{path}: {'.'.join(map(str, where))}", value=value, expected=expected, remedy="correct the price file"
    )


def _by_kind(given: dict[str, Any], path: str) -> dict[str, Any]:
    """The tables by kind alone: H100 for h100 and H100-80. Raises PhalanxError for a kind that the planner does not
    know, whose price would have no effect, and for one that is given twice."""
    known = sorted({name.split("-")[0] for name in GPUS})
    kinds: dict[str, Any] = {}
    for name, price in given.items():
        kind = name.upper().split("-")[0]
        if kind not in known or kind in kinds:
            raise PhalanxError(
                f"{path}: gpu",
                value=name,
                expected=f"each of {', '.join(known)} once at most",
                remedy="correct the price file",
            )
        kinds[kind] = price
    return kinds


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        read: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise PhalanxError(
            str(path), expected="a readable TOML or JSON price file", remedy=f"correct it: {error}"
        ) from error
    if not isinstance(read, dict):
        raise PhalanxError(str(path), expected="tables [site] and [gpu.KIND]", remedy="correct the price file")
    return read
