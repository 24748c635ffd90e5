"""Logs as lines of JSON on stderr: a constant event, then fields."""

from __future__ import annotations

import json
import logging
from typing import Any

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonLines(logging.Formatter):
    """One object a line: event, level, t, and what `extra` held."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        row: dict[str, Any] = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "t": record.created,
        }
        row |= {key: value for key, value in vars(record).items() if key not in _BUILT_IN}
        if record.exc_info:
            row["trace"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


def setup() -> None:
    """Sends every logger's records from `info` on to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
