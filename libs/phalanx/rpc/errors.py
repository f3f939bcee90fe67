"""The errors that keep their class on the wire, and those that say how a call itself ended.

A server raises one of the `PhalanxError`s below (or any other, which becomes INVALID_ARGUMENT) and the client raises
the same class with the same where, value, expected and remedy. What broke outside arrives as `Unavailable`.
"""

from __future__ import annotations

from phalanx.core.errors import OutsideError, PhalanxError


class NotFound(PhalanxError):
    """There is nothing of that name."""


class AlreadyExists(PhalanxError):
    """That name, or that request id, is taken by something else."""


class FailedPrecondition(PhalanxError):
    """Right in form, but not in the state in which things are: another revision, another attempt, a finished job."""


class Superseded(FailedPrecondition):
    """The caller acts for an attempt of a job, and a newer one has been opened: whatever it holds should end itself."""


class OutOfRange(PhalanxError):
    """A position that is gone or not there yet: a revision too old, a step past the end."""


class Exhausted(PhalanxError):
    """More than a stated limit: the size of a message, the number of open streams."""


class Denied(PhalanxError):
    """The caller is known and may not do this; servers audit it."""


class Unauthenticated(Denied):
    """The caller could not prove who it is: certificate or token."""


class Unavailable(OutsideError):
    """The service could not be reached, went away, or said that something outside of it is broken; may be retried."""


class NotUp(Unavailable):
    """Nothing answers at the address of the service."""


class TimedOut(Unavailable):
    """No answer within the deadline of the call; whether the service acted is unknown."""
