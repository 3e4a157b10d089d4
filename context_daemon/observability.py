"""Structured logs and metrics: the only module that knows structlog and prometheus_client."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from prometheus_client import Counter, Gauge, Histogram, start_http_server

__all__ = ["Counter", "Gauge", "Histogram", "bind", "configure_logging", "get_logger", "reading", "serve_metrics"]

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def configure_logging(process: str, level: int = logging.INFO, **bound: str | int) -> None:
    """One JSON object a line on stderr, each with `process` and what is bound (node, job, request, worker, epoch)."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    bind(process=process, **bound)


def bind(**values: str | int) -> None:
    """Add to every later line of this context (task or thread)."""
    structlog.contextvars.bind_contextvars(**values)


def get_logger(**bound: str | int) -> Any:
    """A logger: `.info("event", key=value)`. Bound values come with each of its lines, in any thread."""
    return structlog.get_logger(**bound)


def reading(counter: Counter) -> float:
    """What a counter without labels, or one of its children, stands at."""
    return next(
        sample.value for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")
    )


def serve_metrics(host: str, port: int) -> int:
    """Serve /metrics from a daemon thread. Port 0 takes a free one; returns the port. OSError if it is taken."""
    server, _thread = start_http_server(port, addr=host)
    return int(server.server_port)
