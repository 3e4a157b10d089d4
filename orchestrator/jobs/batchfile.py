"""Reading a batch file: bytes in chunks of any size to numbered lines. Bounded memory, strict UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with one line; line 0 means the file as a whole. `param` names the field, as "body.top_p"."""

    line: int
    code: str
    message: str
    param: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1; blank lines are counted, not yielded
    data: bytes


class LineSplitter:
    """Splits on `\\n` only (`\\r\\n` accepted), so that U+2028 and friends stay data. A BOM and blank lines are skipped."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._rest = bytearray()
        self._number = 0
        self._skipping = False  # inside a line that was already refused for its length

    def feed(self, chunk: bytes) -> Iterator[Line | LineError]:
        self._rest += chunk
        start = 0
        while (end := self._rest.find(b"\n", start)) >= 0:
            yield from self._line(bytes(self._rest[start:end]))
            start = end + 1
        del self._rest[:start]
        if len(self._rest) > self._max:
            if not self._skipping:
                yield self._too_long()
            self._skipping = True
            self._rest.clear()

    def end(self) -> Iterator[Line | LineError]:
        """The last line, which needs no newline."""
        if self._rest or self._skipping:
            yield from self._line(bytes(self._rest))
        self._rest.clear()

    def _line(self, data: bytes) -> Iterator[Line | LineError]:
        self._number += 1
        if self._skipping:
            self._skipping = False
            return
        if self._number == 1:
            data = data.removeprefix(BOM)
        data = data.removesuffix(b"\r")
        if len(data) > self._max:
            self._number -= 1
            yield self._too_long()
            self._number += 1
        elif not data.strip(b" \t\r"):
            return
        else:
            yield self._decoded(data)

    def _decoded(self, data: bytes) -> Line | LineError:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            text = f"not UTF-8: byte 0x{data[error.start]:02x} at column {error.start + 1}"
            return LineError(self._number, "invalid_encoding", text)
        return Line(self._number, data)

    def _too_long(self) -> LineError:
        return LineError(self._number + 1, "line_too_long", f"longer than {self._max} bytes")
