"""Structured logs: one line an event, ``key=value`` pairs, the request id among them."""

from __future__ import annotations

import logging
import sys
import time


def quote(value: object) -> str:
    """A value as it stands in a log line: quoted if it holds a blank, a quote or an equals sign."""
    text = str(value)
    if text and not any(c in text for c in ' "=\n\t'):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class EventFormatter(logging.Formatter):
    """``time=... level=... process=... event=... key=value``; exceptions stay on one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: list[tuple[str, object]] = [
            ("time", f"{stamp}.{int(record.msecs):03d}Z"),
            ("level", record.levelname.lower()),
            ("process", self._process),
            ("event", record.getMessage()),
        ]
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            pairs.extend(fields.items())
        if record.exc_info:
            pairs.append(("exception", self.formatException(record.exc_info)))
        return " ".join(f"{key}={quote(value)}" for key, value in pairs)


def setup_logs(process: str, level: str = "INFO") -> None:
    """Sends the logs of this process to standard error in the one-line form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def event(logger: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """Logs one event with its fields, e.g. ``event(log, "prefill", request=rid, tokens=12)``."""
    if logger.isEnabledFor(level):
        logger.log(level, name, extra={"fields": fields})
