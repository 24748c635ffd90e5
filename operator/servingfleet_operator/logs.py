"""The operator's log lines, and what of its libraries' is kept out of them."""

from __future__ import annotations

import logging

from servingfleet_core import logs


class _Retries(logging.Filter):
    """Holds back what kopf says of each retry of each watch; the metrics count them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "will retry" not in record.getMessage()


def configure(level: str) -> None:
    """Sends all logs to standard error as JSON."""
    logs.configure(level)
    if level != "debug":
        logging.getLogger("kopf._cogs.clients.watching").addFilter(_Retries())
        logging.getLogger("kopf._cogs.clients.fetching").addFilter(_Retries())
    # kopf tells each event at info, and warns that it takes no signals, which are not its business here.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
