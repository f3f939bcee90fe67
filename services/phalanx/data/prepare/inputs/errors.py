"""Input files that cannot be read as what they claim to be, or that changed under us: mistakes a user can mend."""

from __future__ import annotations

from phalanx.core.errors import PhalanxError


class CorruptInput(PhalanxError):
    """A damaged or cut input file; the message names the file and the place: a byte offset, or a part of the file."""

    def __init__(self, location: str, place: int | str, *, expected: str, found: str) -> None:
        self.location, self.place = location, place
        super().__init__(
            f"{location}, {f'byte {place}' if isinstance(place, int) else place}",
            expected=f"{expected}, {found}",
            remedy="copy the file again, or leave it out of the input",
        )


class ChangedInput(PhalanxError):
    """An input file that is not what the listing saw: gone, of another size, or written while it was read."""

    def __init__(self, location: str, found: str) -> None:
        super().__init__(
            location, expected=f"the file as it was listed, {found}", remedy="start again once nothing writes the input"
        )

    @staticmethod
    def of_size(location: str, listed: int, found: int) -> ChangedInput:
        """A file whose size is another than it was listed with."""
        return ChangedInput(location, f"of {listed} bytes, but it has {found}")
