"""AWS notices: spot interruption, rebalance recommendation, and the end that an Auto Scaling group decides."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from context_daemon.records import Notice, NoticeKind
from worker.preemption.imds import ImdsClient
from worker.preemption.source import SourceUnavailable

ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
LIFECYCLE_PATH = "/latest/meta-data/autoscaling/target-lifecycle-state"

# A machine that hibernates is gone for as long as a stopped one.
_KINDS = {"terminate": NoticeKind.TERMINATE, "stop": NoticeKind.STOP, "hibernate": NoticeKind.STOP}


class _Action(msgspec.Struct):
    action: str
    time: str


class _Rebalance(msgspec.Struct):
    noticeTime: str


class AwsSource:
    """Polls the metadata service. `asg_timeout_s` is the heartbeat timeout of the group's lifecycle hook: the service does
    not tell it, so without it the group's decisions are not watched. `now` gives seconds since the epoch."""

    def __init__(
        self, client: ImdsClient, node_id: str, now: Callable[[], float], asg_timeout_s: float | None = None
    ) -> None:
        self._client = client
        self._node_id = node_id
        self._now = now
        self._asg_timeout_s = asg_timeout_s
        self._asg_deadline: float | None = None

    async def poll(self) -> tuple[Notice, ...]:
        found = [parse_action(await self._client.get(ACTION_PATH), self._node_id)]
        found.append(parse_rebalance(await self._client.get(REBALANCE_PATH), self._node_id))
        if self._asg_timeout_s is not None:
            found.append(self._lifecycle(await self._client.get(LIFECYCLE_PATH), self._asg_timeout_s))
        return tuple(notice for notice in found if notice is not None)

    def _lifecycle(self, state: str | None, timeout_s: float) -> Notice | None:
        if state != "Terminated":
            self._asg_deadline = None
            return None
        if self._asg_deadline is None:  # counted from the first sight, so that it stays the same notice
            self._asg_deadline = self._now() + timeout_s
        return Notice(self._node_id, NoticeKind.ASG_TERMINATE, self._asg_deadline, "aws-asg")

    async def close(self) -> None:
        await self._client.close()


def parse_action(text: str | None, node_id: str) -> Notice | None:
    if text is None:
        return None
    try:
        action = msgspec.json.decode(text, type=_Action)
    except msgspec.DecodeError as error:
        raise SourceUnavailable(f"{ACTION_PATH} answered {text[:200]!r}: {error}") from error
    # An action that AWS adds one day takes the machine too: the safe reading is the hardest one.
    kind = _KINDS.get(action.action, NoticeKind.TERMINATE)
    return Notice(node_id, kind, _seconds(ACTION_PATH, action.time), "aws-imds")


def parse_rebalance(text: str | None, node_id: str) -> Notice | None:
    if text is None:
        return None
    try:
        hint = msgspec.json.decode(text, type=_Rebalance)
    except msgspec.DecodeError as error:
        raise SourceUnavailable(f"{REBALANCE_PATH} answered {text[:200]!r}: {error}") from error
    return Notice(node_id, NoticeKind.REBALANCE, _seconds(REBALANCE_PATH, hint.noticeTime), "aws-imds")


def _seconds(path: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SourceUnavailable(f"{path} gave the time {text[:60]!r}: {error}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
