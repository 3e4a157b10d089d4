from __future__ import annotations

import json

from orchestrator.verify import compare


def line(custom_id: str, text: str = "hi", created: int = 1, exact: bool = True) -> bytes:
    body = {
        "id": f"chatcmpl-{created}",
        "created": created,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        "tideover": {"exact": exact},
    }
    response = {"status_code": 200, "request_id": "r", "body": body}
    return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": None}).encode()


def test_equal_answers_of_two_jobs_are_equal_whatever_their_order_and_ids() -> None:
    verdict = compare([line("a"), line("b")], [line("b", created=9), line("a", created=8)])
    assert verdict.ok and verdict.equal == verdict.total == 2


def test_one_other_byte_is_a_difference() -> None:
    verdict = compare([line("a"), line("b")], [line("a"), line("b", "hI")])
    assert not verdict.ok and verdict.different == ("b",) and verdict.equal == 1


def test_missing_duplicated_and_foreign_lines_fail() -> None:
    assert compare([line("a"), line("b")], [line("a")]).missing == ("b",)
    assert compare([line("a")], [line("a"), line("a")]).duplicated == ("a",)
    assert not compare([line("a")], [line("a"), line("z")]).ok


def test_an_error_line_is_not_the_answer() -> None:
    error = json.dumps({"custom_id": "a", "response": None, "error": {"code": "x", "message": "y"}}).encode()
    assert not compare([line("a")], [error]).ok


def test_inexact_lines_are_named() -> None:
    assert compare([line("a")], [line("a", exact=False)]).inexact == ("a",)
