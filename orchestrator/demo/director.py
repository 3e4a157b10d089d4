"""Takes the machines away: one with notice, then, when its replacement is up, another without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.client import TideoverClient


@dataclass(frozen=True, slots=True)
class Faults:
    """What was done to whom; empty names mean that it was not done."""

    noticed: str = ""
    killed: str = ""


class Director(threading.Thread):
    """Watches a job's committed progress and acts on it. `say` gets one line per act."""

    def __init__(
        self,
        address: str,
        job_id: str,
        expected_tokens: int,
        *,
        notice_at: float = 0.15,
        deadline_s: float = 6.0,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="director", daemon=True)
        self._client = TideoverClient(address)
        self._job_id = job_id
        self._notice_tokens = int(notice_at * expected_tokens)
        self._deadline_s = deadline_s
        self._say = say
        self.faults = Faults()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._direct()
        except Exception as error:  # noqa: BLE001 - told by the main thread, which fails the demo
            self.error = error

    def _direct(self) -> None:
        if not self._wait(lambda: self._tokens() >= self._notice_tokens):
            return
        before = self._ready()
        noticed = max(before, key=lambda worker_id: before[worker_id])
        self._say(f"AWS announces on {noticed}'s machine, by IMDSv2: terminated in {self._deadline_s:.0f} s")
        self._client.preempt(noticed, self._deadline_s)
        self.faults = Faults(noticed=noticed)
        if not self._wait(lambda: bool(self._ready().keys() - before.keys())):
            return
        victim = max(before.keys() - {noticed})
        self._say(f"the replacement is up; SIGKILL, without notice, to every process of {victim}'s machine")
        self._client.kill(victim)
        self.faults = Faults(noticed=noticed, killed=victim)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """False if the job ended first."""
        while not condition():
            if self._client.get_job(self._job_id).finished_at:
                return False
            time.sleep(0.1)
        return True

    def _tokens(self) -> int:
        return int(self._client.get_job(self._job_id).output_tokens)

    def _ready(self) -> dict[str, int]:
        """Ready workers and how many sequences each runs."""
        return {worker.worker_id: worker.running for worker in self._client.workers() if worker.state == "ready"}
