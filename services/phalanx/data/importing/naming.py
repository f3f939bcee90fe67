"""What the user named: which files and folders it stands for, in which format, and which files are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.files import Files
from phalanx.data.importing.mds import INDEX, is_mds_index, shard_paths
from phalanx.data.importing.options import Format
from phalanx.data.importing.saved import INFO, STATE, refuse_splits, saved_paths

_SUFFIXES = {".npy": Format.NPY, ".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".idx": Format.MEGATRON}
_KNOWN = "an MDS folder, Megatron .bin/.idx, a saved Hugging Face dataset, .arrow, .parquet, .npy, or raw .bin"
_SHOWN = 5
Stream = tuple[Format, str]  # a file or folder, and how it is understood; of Megatron the prefix of both files


@dataclass(frozen=True, slots=True)
class Named:
    """What one input stands for: streams in order; left_out: files of its folder that are no part of them."""

    streams: list[Stream]
    left_out: Sequence[str] = ()


def named(files: Files, path: str, asked: Format | None) -> Named:
    """What one input stands for. asked: the format that the user told.

    Raises PhalanxError where nothing is there, or its format can't be told.
    """
    if path and files.size(path) is not None:
        return Named([_stream(asked or _format_of_file(files, path), path)])
    if files.is_folder(path):
        return _folder(files, path, asked)
    if path and files.size(f"{path}.idx") is not None:
        return Named([(Format.MEGATRON, path)])
    raise PhalanxError(files.shown(path), expected=_KNOWN, remedy="nothing is there: check the path")


def one_format(files: Files, streams: Sequence[Stream]) -> Format:
    """The format of all streams; raises PhalanxError where they have several."""
    formats = sorted({each.value for each, _ in streams})
    if len(formats) > 1:
        raise PhalanxError(
            files.shown(""), expected="files of one format", remedy=f"they are {' and '.join(formats)}: name --format"
        )
    return streams[0][0]


def _stream(chosen: Format, path: str) -> Stream:
    return chosen, _pair(path) if chosen is Format.MEGATRON else path


def _format_of_file(files: Files, path: str) -> Format:
    suffix = PurePosixPath(path).suffix
    if suffix == ".bin":
        return Format.MEGATRON if files.size(f"{path.removesuffix('.bin')}.idx") is not None else Format.RAW
    if suffix not in _SUFFIXES:
        raise PhalanxError(files.shown(path), expected=_KNOWN, remedy="its name does not say which: name --format")
    return _SUFFIXES[suffix]


def _folder(files: Files, folder: str, asked: Format | None) -> Named:
    """A folder: a dataset that lies in one (MDS, a saved one), else all files of a format below it."""
    whole, own = _dataset(files, folder, asked)
    below = [path for path in files.below(folder) if path not in own]
    streams = _streams(below, asked)
    _refuse_lone(files, streams, asked)
    if whole is None and asked is None:
        _refuse_deeper_mds(files, folder, below)
    if asked is not None:
        streams = [each for each in streams if whole is None and each[0] is asked]
    elif whole is Format.ARROW:  # what `datasets` keeps beside its own files (cache-*.arrow) is no part of it
        streams = [each for each in streams if each[0] is not Format.ARROW]
    if whole is not None:
        streams.insert(0, (whole, folder))
    if not streams:
        raise _nothing(files, folder, below, asked)
    taken, paths = set(streams), {path for _, path in streams}
    return Named(streams, [path for path in below if path not in paths and (Format.MEGATRON, _pair(path)) not in taken])


def _dataset(files: Files, folder: str, asked: Format | None) -> tuple[Format | None, set[str]]:
    """The format of the dataset that a folder is (None: it is none), and the dataset's own files."""
    prefix = f"{folder}/" if folder else ""
    index_bytes = files.size(f"{prefix}{INDEX}")
    index = b"" if index_bytes is None else files.open(f"{prefix}{INDEX}", index_bytes).whole()
    if asked is Format.MDS or (asked is None and is_mds_index(index)):
        return Format.MDS, {f"{prefix}{INDEX}", *shard_paths(index, prefix)}
    refuse_splits(files, folder)
    if asked in (None, Format.ARROW) and files.size(f"{prefix}{STATE}") is not None:
        return Format.ARROW, {f"{prefix}{STATE}", f"{prefix}{INFO}", *saved_paths(files, folder)}
    return None, set()


def _streams(below: Sequence[str], asked: Format | None) -> list[Stream]:
    """Every file of a known kind, by its suffix; a .bin belongs to its .idx, unless raw files are asked for."""
    there, found = set(below), list[Stream]()
    for path in below:
        suffix = PurePosixPath(path).suffix
        if suffix in _SUFFIXES:
            found.append(_stream(_SUFFIXES[suffix], path))
        elif suffix == ".bin" and (asked is Format.RAW or f"{_pair(path)}.idx" not in there):
            found.append((Format.RAW, path))
    return found


def _pair(path: str) -> str:
    """What a .bin and its .idx share."""
    return path.removesuffix(".bin") if path.endswith(".bin") else path.removesuffix(".idx")


def _refuse_lone(files: Files, streams: Sequence[Stream], asked: Format | None) -> None:
    """Raises PhalanxError for a .bin without its .idx among others that have one: the dataset is not whole."""
    formats = {each for each, _ in streams}
    if (asked is None and formats == {Format.MEGATRON, Format.RAW}) or (
        asked is Format.MEGATRON and Format.RAW in formats
    ):
        lone = next(path for each, path in streams if each is Format.RAW)
        raise PhalanxError(
            files.shown(lone),
            expected=f"{PurePosixPath(lone).stem}.idx beside it",
            remedy="it is missing: copy it; or, if this is a raw file, move it out and import it apart",
        )


def _refuse_deeper_mds(files: Files, folder: str, below: Sequence[str]) -> None:
    """Raises PhalanxError for MDS shards in a folder that is no MDS dataset itself: they may be of several."""
    folders = sorted({str(PurePosixPath(path).parent) for path in below if ".mds" in PurePosixPath(path).suffixes})
    if folders:
        more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
        raise PhalanxError(
            files.shown(folder),
            expected=f"{INDEX} of its MDS shards in it",
            remedy=f"name the folders that hold shards and index ({', '.join(folders[:_SHOWN])}{more})",
        )


def _nothing(files: Files, folder: str, below: Sequence[str], asked: Format | None) -> PhalanxError:
    if asked is None:
        return PhalanxError(files.shown(folder), expected=_KNOWN, remedy="it holds none: check the path")
    suffix = next((suffix for suffix, each in _SUFFIXES.items() if each is asked), ".bin")
    return PhalanxError(
        files.shown(folder), expected=f"files ending in {suffix}", remedy=f"it holds none, and {len(below):,} others"
    )
