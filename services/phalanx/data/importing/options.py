"""How the files of an import are to be understood; all of it decides what comes out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from phalanx.core.errors import PhalanxError

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
TOKEN_COLUMNS = ("input_ids", "tokens", "token_ids", "ids")  # looked for in this order where none is named


class Format(enum.Enum):
    """Formats that tokens lie in."""

    MDS = "mds"
    MEGATRON = "megatron"
    ARROW = "arrow"
    PARQUET = "parquet"
    NPY = "npy"
    RAW = "raw"


class Boundaries(enum.Enum):
    """Where documents end. ROWS: each row is a document. EOS: rows are laid end to end and cut behind each EOS id."""

    ROWS = "rows"
    EOS = "eos"


_TAKEN_BY = {
    "--column": (Format.MDS, Format.ARROW, Format.PARQUET),
    "--id-column": (Format.MDS, Format.ARROW, Format.PARQUET),
    "--dtype": (Format.MDS, Format.RAW),
    "--skip-bytes": (Format.RAW,),
    "--sequences": (Format.MEGATRON,),
}


@dataclass(frozen=True, slots=True)
class Understanding:
    """format, boundaries: None: as the files suggest. column, id_column: of MDS, arrow and parquet. dtype: of raw files
    and of MDS columns of plain bytes, with `<` or `>` in front where the byte order matters. skip_bytes: header of raw
    files. sequences: of Megatron files each sequence is a row, not each document.
    """

    format: Format | None = None
    boundaries: Boundaries | None = None
    column: str | None = None
    id_column: str | None = None
    dtype: str | None = None
    skip_bytes: int = 0
    sequences: bool = False

    def check(self) -> None:
        """Raises PhalanxError for a value out of range."""
        if self.dtype is not None and self.dtype.lstrip("<>") not in DTYPES:
            raise PhalanxError(
                "--dtype",
                value=self.dtype,
                expected=f"one of {', '.join(DTYPES)}, with < or > in front for a byte order",
                remedy="name the integer type of the ids",
            )
        if self.skip_bytes < 0:
            raise PhalanxError(
                "--skip-bytes", value=self.skip_bytes, expected="0 or more", remedy="count the header's bytes"
            )
        for option, name in (("--column", self.column), ("--id-column", self.id_column)):
            if name == "":
                raise PhalanxError(option, value=name, expected="a column's name", remedy="name one")

    def check_for(self, chosen: Format) -> None:
        """Raises PhalanxError for a choice that has no effect on files of this format."""
        options = {
            "--column": self.column,
            "--id-column": self.id_column,
            "--dtype": self.dtype,
            "--skip-bytes": self.skip_bytes or None,
            "--sequences": self.sequences or None,
        }
        for option, given in options.items():
            if given is not None and chosen not in _TAKEN_BY[option]:
                raise PhalanxError(
                    option,
                    value=None if given is True else given,
                    expected=f"no such option with {chosen.value} files",
                    remedy="leave it out",
                )

    def required_dtype(self, where: str) -> str:
        """The type of ids in a file that does not say it, in numpy's short form; raises PhalanxError where it was not
        given.
        """
        if self.dtype is None:
            raise PhalanxError(
                where, expected="--dtype, which such a file does not say", remedy="name it, as --dtype uint16"
            )
        big_endian = self.dtype.startswith(">")
        return str(np.dtype(self.dtype.lstrip("<>")).newbyteorder(">" if big_endian else "<").str)
