"""The documents name files and functions: each must exist, so that a newcomer is never sent to a place that moved."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
_FUNCTION = re.compile(r"`([\w/]+\.py):([\w.]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def _defined(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_file_and_function_named_is_there(doc: Path) -> None:
    missing = [
        f"{file}:{name}"
        for file, name in _FUNCTION.findall(doc.read_text())
        if not (ROOT / file).is_file() or name not in _defined(ROOT / file)
    ]
    assert missing == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(doc: Path) -> None:
    assert [link for link in _LINK.findall(doc.read_text()) if not (doc.parent / link).exists()] == []


def test_the_life_of_a_request_names_a_function_in_each_of_its_ten_steps() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.split("## One request's life")[1].split("\n## ")[0]
    steps = re.split(r"\n\d+\. ", life)[1:]
    assert len(steps) == 10
    assert all(re.search(r"`[\w/.{},]*\.(py|lua)|`\w+\.\w+`", step) for step in steps)
