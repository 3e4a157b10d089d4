from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.demo.lasting import MOST, longer, next_factor


def test_every_length_grows_and_nothing_else_changes(tmp_path: Path) -> None:
    file = tmp_path / "batch.jsonl"
    lines = [
        {"custom_id": "a", "body": {"max_tokens": 10, "prompt": "Straße"}},
        {"custom_id": "b", "body": {"max_completion_tokens": 7, "seed": 3}},
        {"custom_id": "c", "body": {"messages": []}},
    ]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n", encoding="utf-8")
    made = [json.loads(line) for line in longer(file, 3, tmp_path).read_text(encoding="utf-8").splitlines()]
    lines[0]["body"] |= {"max_tokens": 30}  # type: ignore[operator]
    lines[1]["body"] |= {"max_completion_tokens": 21}  # type: ignore[operator]
    assert made == lines


@pytest.mark.parametrize(
    ("factor", "seconds", "expected"),
    [(1, 40.0, 1), (1, 17.0, 3), (1, 34.9, 2), (3, 34.0, 4), (2, 0.0, MOST), (MOST, 1.0, MOST), (1, 35.0, 1)],
)
def test_as_much_longer_as_is_missing(factor: int, seconds: float, expected: int) -> None:
    assert next_factor(factor, seconds, 35.0) == expected
