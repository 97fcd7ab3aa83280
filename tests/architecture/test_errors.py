"""Every failure that the package raises for a user says what to do about it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {"PiError", "UsageError", "DoesNotFit"}
SPINE = ROOT / "src" / "powerinfer_toolkit"
STAGES = [path for path in SPINE.iterdir() if path.is_symlink()]


def without_hint(source: str) -> list[int]:
    """Lines that raise an error without a hint."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [call for call in calls if getattr(call.func, "id", "") in ERRORS]
    return [c.lineno for c in made if "hint" not in {keyword.arg for keyword in c.keywords}]


@pytest.mark.parametrize(
    ("source", "lines"), [("raise PiError('x')", [1]), ("raise PiError('x', hint='y')", [])]
)
def test_missing_hints_are_seen(source: str, lines: list[int]) -> None:
    assert without_hint(source) == lines


def test_every_error_has_a_hint() -> None:
    assert len(STAGES) == 5
    paths = [path for folder in (SPINE, *STAGES) for path in folder.resolve().rglob("*.py")]
    found = {str(path): without_hint(path.read_text()) for path in paths}
    assert not {path: lines for path, lines in found.items() if lines}
