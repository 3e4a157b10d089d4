"""What of the demo model's preparation does not need the download."""

from __future__ import annotations

import importlib.metadata

import pytest

from worker.demo_model import _pip_tells_progress


@pytest.mark.parametrize(("version", "told"), [("23.2.1", False), ("24.0", False), ("24.1", True), ("25.0.dev0", True)])
def test_pip_is_asked_for_raw_progress_only_when_it_knows_it(
    monkeypatch: pytest.MonkeyPatch, version: str, told: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    assert _pip_tells_progress() is told
