"""Log lines as JSON: a constant event, then fields. Never tokens, keys or the content of a Secret."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line; what `extra` gave becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Retries(logging.Filter):
    """Holds back what kopf says of each retry of each watch; the metrics count them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "will retry" not in record.getMessage()


def configure(level: str) -> None:
    """Sends all logs to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("kopf._cogs.clients.watching").addFilter(_Retries())
        logging.getLogger("kopf._cogs.clients.fetching").addFilter(_Retries())
    # kopf tells each event at info, and warns that it takes no signals, which are not its business here.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
