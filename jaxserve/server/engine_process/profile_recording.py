"""Profiles of what the engine's process does, recorded by JAX."""

import logging
import os
import tempfile
from typing import Any

import jax

from jaxserve.errors import RequestFailedError

logger = logging.getLogger(__name__)


class ProfileRecording:
    """A profile that is recorded from ``begin`` to ``finish``; JAX records one at a time.

    Args:
        directory: Where it is to be written; made if it is not there.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._session: Any = None

    def begin(self) -> None:
        """Begins the recording.

        Raises:
            RequestFailedError: Nothing can be written there, which JAX would find out at the end, or JAX cannot record.
        """
        directory = self._directory
        try:
            os.makedirs(directory, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            message = f"no profile can be recorded: {directory!r} is no directory that can be written: {error.strerror}"
            raise RequestFailedError(message) from error
        try:
            self._session = jax.profiler.start_trace(directory)
        except Exception as error:
            logger.exception("no profile can be recorded")
            raise RequestFailedError("no profile can be recorded; the log says why") from error

    def finish(self) -> None:
        """Ends the recording and writes it.

        Raises:
            RequestFailedError: It cannot be written; it may be finished again.
        """
        # From 0.12 on JAX gives a session, which has ended even where it could not be written. Before, it gives none,
        # and a recording goes on until it is written.
        session = self._session
        try:
            if session is None or session.is_running:
                jax.profiler.stop_trace()
            else:
                session.export_profile_data(self._directory)
        except Exception as error:
            logger.exception("the profile cannot be written")
            raise RequestFailedError("the profile cannot be written; the log says why") from error
