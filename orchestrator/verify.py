"""The verdict: does a disturbed job give the bytes of an undisturbed one? Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    total: int
    equal: int
    different: tuple[str, ...]  # custom ids
    missing: tuple[str, ...]
    duplicated: tuple[str, ...]
    inexact: tuple[str, ...]  # crossed numerics classes: nothing was promised for them

    @property
    def ok(self) -> bool:
        return self.equal == self.total and not (self.different or self.missing or self.duplicated)


def answers(lines: Iterable[bytes]) -> tuple[dict[str, bytes], list[str], list[str]]:
    """What a user compares, by custom_id: the choices and the usage, as bytes. Also duplicated and inexact ids.

    Left out are only the ids of the job and the time of creation, which name the job and not its answer.
    """
    found: dict[str, bytes] = {}
    duplicated: list[str] = []
    inexact: list[str] = []
    for payload in lines:
        line = json.loads(payload)
        custom_id = line["custom_id"]
        if custom_id in found:
            duplicated.append(custom_id)
        found[custom_id] = _comparable(line)
        body = (line.get("response") or {}).get("body") or {}
        if body.get("tideover", {}).get("exact") is False:
            inexact.append(custom_id)
    return found, duplicated, inexact


def _comparable(line: Mapping[str, object]) -> bytes:
    response = line.get("response")
    if not isinstance(response, dict):
        return json.dumps({"error": line.get("error")}, sort_keys=True).encode()
    body = response["body"]
    part = {"status": response["status_code"], "choices": body.get("choices"), "usage": body.get("usage")}
    return json.dumps(part, sort_keys=True).encode()


def compare(reference: Iterable[bytes], disturbed: Iterable[bytes]) -> Verdict:
    """Result lines (one JSON object each) of both runs, in any order."""
    wanted, _, _ = answers(reference)
    got, duplicated, inexact = answers(disturbed)
    different = [name for name, value in wanted.items() if name in got and got[name] != value]
    missing = [name for name in wanted if name not in got]
    extra = [name for name in got if name not in wanted]
    equal = len(wanted) - len(different) - len(missing)
    return Verdict(len(wanted), equal, tuple(different + extra), tuple(missing), tuple(duplicated), tuple(inexact))
