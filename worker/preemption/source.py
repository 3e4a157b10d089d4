"""What a cloud's notice source is to the watcher."""

from __future__ import annotations

from typing import Protocol

from context_daemon.records import Notice


class SourceUnavailable(Exception):
    """The source could not be asked, or its answer not be understood; says nothing about notices. Ask again."""


class NoticeSource(Protocol):
    async def poll(self) -> tuple[Notice, ...]:
        """All that is announced for this machine now. Raises SourceUnavailable, and nothing else, when not known."""

    async def close(self) -> None: ...
