"""Credentials that may grow old during a run: taken from the AWS chain, and taken again where the server refuses them.

botocore renews by itself what it knows the end of (roles, instance profiles). It does not look again at files that
somebody else rewrites, as sign-on scripts and vault agents do; `renew` does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.objects.base import StoreDenied

# What a server says of credentials that were good once, whatever the status it says it with.
EXPIRED_CODES = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired")
_QUIET_S = 60.0


class Credentials:
    """The credentials of one botocore session, replaced by those of a new one when they have changed.

    generation: how often they were replaced; clients that keep credentials compare it. Safe to use from several
    threads.
    """

    def __init__(self, open_session: Callable[[], Any]) -> None:
        self._open_session = open_session
        self._session = open_session()
        self._lock = threading.Lock()
        self._refused_s: float | None = None
        self.generation = 0

    @property
    def session(self) -> Any:
        """The botocore session to make clients with."""
        return self._session

    def frozen(self) -> Any:
        """Key, secret and token as they are now, or None where the chain has none.

        Raises StoreDenied for one that no request can carry.
        """
        found = self._session.get_credentials()
        if found is None:
            return None
        frozen = found.get_frozen_credentials()
        for name in ("access_key", "secret_key", "token"):
            if not (getattr(frozen, name) or "").isprintable():
                raise StoreDenied(
                    f"AWS credentials from {found.method}",
                    expected=f"printable characters alone in {name}",
                    remedy="write them anew, without line ends and other control characters",
                )
        return frozen

    def renew(self) -> bool:
        """Looks through the chain again; returns whether it now gives other credentials than before."""
        with self._lock:
            fresh = self._open_session()
            found = fresh.get_credentials()
            if found is None or found.get_frozen_credentials() == self.frozen():
                return False
            self._session, self.generation = fresh, self.generation + 1
            return True

    def renew_after_refusal(self) -> bool:
        """As `renew`, but only where no refusal came shortly before: a role gives new keys at every look, and a refusal
        of fresh ones is not about their age.
        """
        now, before = time.monotonic(), self._refused_s
        self._refused_s = now
        return (before is None or now - before > _QUIET_S) and self.renew()
