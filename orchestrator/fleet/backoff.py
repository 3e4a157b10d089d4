"""Exponential back-off by name: pure, the clock passed in."""

from __future__ import annotations


class Backoff:
    """After the n-th failure in a row a name is ready again `first_s * 2**(n-1)` seconds later, at most `most_s`."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._failures: dict[str, tuple[int, float]] = {}

    def ready(self, name: str, now: float) -> bool:
        count, at = self._failures.get(name, (0, 0.0))
        return count == 0 or now >= at + self.delay(count)

    def delay(self, failures: int) -> float:
        return min(self._most_s, self._first_s * 2.0 ** (failures - 1))

    def failed(self, name: str, now: float) -> int:
        count = self._failures.get(name, (0, 0.0))[0] + 1
        self._failures[name] = (count, now)
        return count

    def succeeded(self, name: str) -> None:
        self._failures.pop(name, None)
