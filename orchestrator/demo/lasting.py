"""A batch whose answers are made longer: faults must meet work in its middle, however fast the machine is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

MOST = 16  # times as long; beyond that answers end by themselves or at the model's length
_LENGTHS = ("max_tokens", "max_completion_tokens")


def longer(file: Path, factor: int, folder: Path) -> Path:
    """The batch of `file` with `factor` times the length that each line asks for, as a file in `folder`."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    made = folder / f"{file.stem}-{factor}.jsonl"
    text = "".join(json.dumps(_longer(line, factor), ensure_ascii=False) + "\n" for line in lines)
    made.write_text(text, encoding="utf-8")
    return made


def _longer(line: dict[str, Any], factor: int) -> dict[str, Any]:
    body = line["body"]
    return {**line, "body": body | {name: body[name] * factor for name in _LENGTHS if name in body}}


def next_factor(factor: int, seconds: float, wanted_s: float) -> int:
    """How much longer to try after `factor` times lasted `seconds`; `factor` itself when that is enough, or all there is."""
    if seconds >= wanted_s or factor >= MOST:
        return factor
    return min(MOST, max(factor + 1, math.ceil(factor * wanted_s / max(seconds, 0.1))))
