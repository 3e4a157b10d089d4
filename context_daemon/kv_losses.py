"""Which requests lost what they had in the KV store, told by the generation of the server that they lie on. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from context_daemon.records import RequestKey


@dataclass(slots=True)
class _Seen:
    generation: str = ""  # of the server, when it last answered for this request
    doubtful: bool = False  # the store was said to have pages while the server was away
    epoch: int = 0  # the newest owner's
    losses: int = 0  # since that owner began


class KVLosses:
    """A generation is drawn at random and names one life of one server: when it is over for one request, it is over for all
    that were seen under it. Counts are per owner and begin at 0, so that an owner needs no generation to compare with.

    The `remembered` requests that were heard of last are kept; of any other a loss goes unseen, and costs a restore time.
    """

    def __init__(self, remembered: int = 100_000) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[RequestKey, _Seen] = OrderedDict()
        self._under: dict[str, dict[RequestKey, None]] = {}  # requests by generation

    def heard(self, key: RequestKey, generation: str) -> list[RequestKey]:
        """The server of `key` answered. Returns the requests whose earlier pages, of all epochs, may be gone."""
        seen = self._of(key)
        if seen.generation == generation:
            return []
        lost = list(self._under[seen.generation]) if seen.generation else [key] * seen.doubtful
        for each in dict.fromkeys([*lost, key]):
            self._move(each, generation)
        for each in lost:
            self._seen[each].losses += 1
        return lost

    def restoring(self, key: RequestKey, epoch: int, generation: str | None) -> list[RequestKey]:
        """An owner is about to rely on pages of the store: what is lost from here on is counted for it. None when the server
        is away: it may come back empty, and nothing of its former life is known here. Returns what `heard` does."""
        lost = self.heard(key, generation) if generation else []
        seen = self._of(key)
        seen.doubtful = not seen.generation
        self._begin(seen, epoch)
        return lost

    def count(self, key: RequestKey, epoch: int) -> int:
        """How often the owner under `epoch` must write all again that it has; 0 for a former owner."""
        seen = self._of(key)
        self._begin(seen, epoch)
        return seen.losses if seen.epoch == epoch else 0

    def forget(self, key: RequestKey) -> None:
        if key in self._seen:
            self._leave(key, self._seen.pop(key).generation)

    def samples(self) -> list[RequestKey]:
        """One request of each generation: who asks for these hears of every loss."""
        return [next(iter(keys)) for keys in self._under.values()]

    def _of(self, key: RequestKey) -> _Seen:
        seen = self._seen.setdefault(key, _Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > self._remembered:
            self.forget(next(iter(self._seen)))
        return seen

    @staticmethod
    def _begin(seen: _Seen, epoch: int) -> None:
        if epoch > seen.epoch:
            seen.epoch, seen.losses = epoch, 0

    def _move(self, key: RequestKey, generation: str) -> None:
        seen = self._seen[key]
        self._leave(key, seen.generation)
        seen.generation, seen.doubtful = generation, False
        self._under.setdefault(generation, {})[key] = None

    def _leave(self, key: RequestKey, generation: str) -> None:
        keys = self._under.get(generation, {})
        keys.pop(key, None)
        if not keys:
            self._under.pop(generation, None)
