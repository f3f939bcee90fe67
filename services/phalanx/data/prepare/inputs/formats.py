"""What a file is, told by its name alone: one document, JSON lines, parquet or a WebDataset tar; plain or compressed.

`.json` is one document (source trees are full of them), but `.json.gz` and `.json.zst` are JSON lines: so large
corpora are published. Other names are text: a file named in full is read whatever it is called.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".json"),
        *(".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql", ".proto", ".cmake", ".sh", ".bash"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".go", ".rs", ".swift"),
        *(".java", ".kt", ".scala", ".js", ".mjs", ".ts", ".tsx", ".jsx", ".css", ".rb", ".php", ".pl", ".lua"),
        *(".r", ".jl", ".hs", ".ml", ".ex", ".erl"),
    }
)
_JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SHORT_FORMS = {".tgz": ".tar.gz", ".tzst": ".tar.zst"}


class Kind(enum.Enum):
    """How documents lie in a file. FILE: it is one document."""

    FILE = "file"
    JSON_LINES = "jsonl"
    PARQUET = "parquet"
    TAR = "tar"


@dataclass(frozen=True, slots=True)
class Format:
    """kind, and compression: "gz", "zst" or "" for none. is_known: the name's suffix says so; else it is a guess."""

    kind: Kind
    compression: str
    is_known: bool

    @property
    def can_be_split(self) -> bool:
        """Whether ranges of such a file can be read alone."""
        return self.kind is Kind.PARQUET or (self.kind is Kind.JSON_LINES and not self.compression)


_ONE_TEXT = Format(Kind.FILE, "", True)


def format_of(path: str) -> Format:
    """The format of the file called `path`, by its suffixes in any case."""
    stem, suffix = _split(path.rpartition("/")[2].lower())
    if suffix in TEXT_SUFFIXES:
        return _ONE_TEXT
    if suffix in _SHORT_FORMS:
        stem, suffix = _split(stem + _SHORT_FORMS[suffix])
    compression = _COMPRESSIONS.get(suffix, "")
    inner = _split(stem)[1] if compression else suffix
    if inner in _JSON_LINES_SUFFIXES or (compression and inner == ".json"):
        return Format(Kind.JSON_LINES, compression, True)
    if inner == ".tar":
        return Format(Kind.TAR, compression, True)
    if inner == ".parquet" and not compression:
        return Format(Kind.PARQUET, "", True)
    return Format(Kind.FILE, compression, inner in TEXT_SUFFIXES)


def _split(name: str) -> tuple[str, str]:
    """Stem and last suffix; a leading dot begins no suffix."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, dot + suffix) if stem else (name, "")
