"""Counted on both sides of a restore: the daemon misses pages, the worker finds that bytes do not match."""

from __future__ import annotations

from context_daemon.observability import Counter

ABSENT_PAGES = Counter("tideover_absent_pages_total", "Pages that ended a restore early, by reason", ["reason"])
