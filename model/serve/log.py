"""Log of the server on stderr: one line per event, without unescaped text of clients."""

from __future__ import annotations

import logging
import os
import traceback

from nkw.errors import shown

LOG = logging.getLogger("nkw.serve")


class OneLine(logging.Formatter):
    """Formatter that writes one line per record, with control characters escaped and `prefix` before the message.

    Of an exception it writes the type and the source line, and never the message, which may quote a client.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record: time, level, prefix, message and, of an exception, its type and source line."""
        record.asctime = self.formatTime(record)
        line = f"{record.asctime} {record.levelname} {self._prefix}{' '.join(record.getMessage().split())}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            source_line = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            line += f": {type(error).__name__}{source_line}"
        return shown(line)


def log_to_stderr(level: str, prefix: str = "") -> None:
    """Send the log of this server, and warnings of uvicorn, to a copy of stderr, each line after `prefix`.

    While the tokenizers library runs, descriptor 2 is redirected (`nkw.process.quiet`); the copy is not.

    Args:
        level: Lowest level of this server's messages, such as info.
        prefix: Text before each message.
    """
    stream = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine(prefix))
    for name, lowest_level in (("nkw.serve", level.upper()), ("uvicorn.error", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest_level)
