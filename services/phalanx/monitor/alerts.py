"""Tells people of incidents: a line in the log, and a post to a webhook.

The webhook's URL stands in a file of its own, as it is a secret. What is posted carries the incident's id, which stays
the same: told again after a kill between the post and its note, it can be recognised.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.incident import Incident, action_name, action_value

LOG = logging.getLogger("phalanx.monitor.incidents")
POST_DEADLINE_S, MAX_TRIES = 5.0, 5


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where incidents are posted. No repr shows the URL."""

    url: SplitResult = field(repr=False)

    @staticmethod
    def read(path: Path) -> Webhook:
        """The URL in the file; raises PhalanxError."""
        try:
            url = urlsplit(path.read_text().strip())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise PhalanxError(
                str(path), expected=f"a file with a URL ({type(error).__name__})", remedy="check options.webhook"
            ) from error
        if url.scheme not in ("http", "https") or not url.hostname:
            raise PhalanxError(str(path), expected="an http or https URL", remedy="write one line with it")
        return Webhook(url)

    def post(self, body: bytes, deadline_s: float = POST_DEADLINE_S) -> None:
        """Raises OutsideError, without the URL, unless it is taken within the deadline."""
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.url.hostname or "", self.url.port, timeout=deadline_s)
        watchdog = threading.Timer(deadline_s, _cut, (connection,))
        watchdog.daemon = True
        watchdog.start()
        try:
            target = self.url._replace(scheme="", netloc="", fragment="").geturl() or "/"
            connection.request("POST", target, body, {"Content-Type": "application/json"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException, AttributeError) as error:
            raise OutsideError(f"the webhook does not answer: {type(error).__name__}") from error
        finally:
            watchdog.cancel()
            connection.close()
        if not 200 <= status < 300:
            raise OutsideError(f"the webhook answers {status}")


class Alerts:
    """Tells of incidents one by one; counts what a webhook did not take."""

    def __init__(self, webhook: Webhook | None = None) -> None:
        self._webhook = webhook
        self.num_posted = self.num_failed = 0

    def tell(self, incident: Incident, stop: threading.Event) -> bool:
        """One line, and a post that is tried `MAX_TRIES` times. False when `stop` came before that was done."""
        LOG.warning("%s", line(incident))
        if self._webhook is None:
            return True
        for number in range(MAX_TRIES):
            try:
                self._webhook.post(body(incident))
            except OutsideError as error:
                LOG.warning("%s (try %d of %d)", error, number + 1, MAX_TRIES)
                if number + 1 < MAX_TRIES and stop.wait(2.0**number):
                    return False
            else:
                self.num_posted += 1
                return True
        self.num_failed += 1
        return True


def line(incident: Incident) -> str:
    """The incident in one line."""
    message = " ".join(incident.cause.message.split())
    where = f" step {incident.step}" if incident.step else ""
    told = f"asks for {action_name(action_value(incident.action))}" if not incident.outcome else incident.outcome
    attempt = f" attempt {incident.attempt}{where}" if incident.attempt else ""
    return f"incident {incident.id}: {incident.kind} in {incident.job or 'no job'}{attempt}: {message}; {told}"


def body(incident: Incident) -> bytes:
    """What is posted: plain JSON; `text` is what chat programs show."""
    return json.dumps(
        {
            "text": line(incident),
            "id": incident.id,
            "job": incident.job,
            "attempt": incident.attempt,
            "step": incident.step,
            "kind": incident.kind,
            "message": incident.cause.message,
            "rank": incident.cause.rank if incident.cause.HasField("rank") else None,
            "node": incident.cause.node_id,
            "action": incident.action.value,
        }
    ).encode()


def _cut(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        connection.sock.close()
