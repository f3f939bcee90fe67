"""Folders that Hugging Face's `save_to_disk` wrote: which arrow files they hold, in which order."""

from __future__ import annotations

import json

from phalanx.core.errors import PhalanxError
from phalanx.data.importing.errors import BadTokens, malformed
from phalanx.data.importing.files import Files

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def saved_paths(files: Files, folder: str) -> list[str]:
    """The arrow files of a folder written by `save_to_disk`, in order; raises BadTokens for a `state.json` that is
    none, or that selects rows.
    """
    path = f"{folder}/{STATE}" if folder else STATE
    where = files.shown(path)
    try:
        state = json.loads(files.open(path, files.existing_size(path)).whole())
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise malformed(where, "the state of a saved dataset", f"it is none ({error!r})") from error
    if state.get("_indices_data_files"):
        raise BadTokens(
            where,
            expected="rows in the order of its files, it has indices",
            remedy="flatten_indices() and save it anew",
        )
    return [f"{folder}/{name}" if folder else name for name in names]


def refuse_splits(files: Files, folder: str) -> None:
    """Raises PhalanxError for the folder of a DatasetDict: its splits are told by name."""
    path = f"{folder}/{SPLITS}" if folder else SPLITS
    size = files.size(path)
    if size is None:
        return
    try:
        names = [str(name) for name in json.loads(files.open(path, size).whole())["splits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise malformed(files.shown(path), "a list of splits", f"it is none ({error!r})") from error
    raise PhalanxError(
        files.shown(folder),
        expected="one split",
        remedy=f"it holds several: name the folder of one ({', '.join(names)})",
    )
