"""Reads the auth file again when it changes, and ends the requests of revoked and expired keys."""

import asyncio
import logging
from pathlib import Path

from jaxserve.api.errors import ConfigError
from jaxserve.server.audit import audit
from jaxserve.server.errors import UnauthenticatedError
from jaxserve.server.frontend import Frontend

logger = logging.getLogger(__name__)

_CHECK_S = 1.0


class KeyWatch:
    """Watches the auth file of a server.

    Args:
        frontend: Has the keys and the requests in flight.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend
        self._seen = self._state()

    async def run(self) -> None:
        """Check the file and the times of expiry once a second, for ever."""
        while True:
            await asyncio.sleep(_CHECK_S)
            self.check()

    def check(self) -> None:
        """Read the file again if it has changed, and end requests of keys that have expired."""
        if self._state() != self._seen:
            self.reload()
        expired = self._frontend.authenticator.expired
        if expired:
            self._frontend.end_callers(expired, UnauthenticatedError("the API key has expired"))

    def reload(self) -> None:
        """Read the file again; a file with a mistake changes nothing."""
        self._seen = self._state()
        frontend = self._frontend
        try:
            revoked = frontend.authenticator.reload()
        except ConfigError as error:
            audit("server", "reload of keys", "-", str(error))
            logger.error("the changed auth file is not used, and the keys before it stay valid: %s", error)
            return
        num_ended = frontend.end_callers(revoked, UnauthenticatedError("the API key was revoked"))
        names = {caller.name for caller in frontend.authenticator.callers}
        frontend.log.usage.forget(revoked - names)
        audit("server", "reload of keys", "-", "ok", revoked=", ".join(sorted(revoked)))
        logger.info(
            "the auth file was read again: %d keys; revoked: %s, whose %d requests were ended",
            *(len(names), ", ".join(sorted(revoked)) or "none", num_ended),
        )

    def _state(self) -> tuple[int, int, int] | None:
        """Return what changes when the file is written or replaced; None for a missing file."""
        path = self._frontend.config.auth_file
        try:
            found = Path(path or "").stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
