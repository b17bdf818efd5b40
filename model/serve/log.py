"""The server's log on stderr: one line an event, nothing of a client raw."""

from __future__ import annotations

import logging
import os
import traceback

from nkw.errors import shown

LOG = logging.getLogger("nkw.serve")


class OneLine(logging.Formatter):
    """A line whose control characters are escaped; of an exception its type and its place, not its message."""

    def __init__(self, prefix: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        record.asctime = self.formatTime(record)
        line = f"{record.asctime} {record.levelname} {self._prefix}{' '.join(record.getMessage().split())}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            line += f": {type(error).__name__}{place}"
        return shown(line)


def log_to_stderr(level: str, prefix: str = "") -> None:
    """Write this server's messages, and uvicorn's, to a copy of stderr, behind a prefix.

    While the tokenizers library runs, descriptor 2 leads nowhere (`nkw.process.quiet`); the copy stays.
    """
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine(prefix))
    for name, least in (("nkw.serve", level.upper()), ("uvicorn.error", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)
