"""The documentation says what the commands do: docs/cli.md is fresh, README's commands parse."""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MAKEFILE = ROOT / "Makefile"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/bench.md")


def load_generator():
    path = ROOT / "docs" / "generate_cli.py"
    spec = importlib.util.spec_from_file_location("generate_cli", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()
PARSERS: dict[str, argparse.ArgumentParser] = GENERATOR.parsers()


def test_cli_page_is_fresh() -> None:
    assert GENERATOR.PAGE.read_text() == GENERATOR.render(), "run: make docs"


def test_every_flag_is_described() -> None:
    for name, parser in PARSERS.items():
        actions = [action for group in parser._action_groups for action in group._group_actions]
        silent = [action.dest for action in actions if not action.help]
        assert not silent, f"{name}: no help for {silent}"


def fenced_commands(page: str) -> list[str]:
    """Return the commands in the `sh` blocks of a page, comments and continuations resolved."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def simple_commands(line: str) -> list[list[str]]:
    """Split a shell line at pipes, && and ;, dropping comments, settings and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set("|&;"):
            commands.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        elif commands[-1] or not re.fullmatch(r"\w+=.*", word):
            commands[-1].append(word)
    return [command for command in commands if command]


def check_parse(words: list[str]) -> str:
    """Return why a command's own parser refuses the words, or ""."""
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
        try:
            PARSERS[words[0]].parse_args(words[1:])
        except SystemExit as end:
            return complaint.getvalue() if end.code else ""
    return ""


def check_make(words: list[str]) -> str:
    targets = re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.MULTILINE)
    unknown = [word for word in words[1:] if "=" not in word and word not in targets]
    return f"no such target: {unknown}" if unknown else ""


def check_script(words: list[str]) -> str:
    """`python path`: the path exists; `python -m module` names a module of the package or of Python."""
    if words[1] == "-m":
        found = importlib.util.find_spec(words[2].split(".")[0])
        return "" if found else f"no module {words[2]}"
    return "" if (ROOT / words[1]).is_file() else f"no file {words[1]}"


CHECKS: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(PARSERS, check_parse),
    "make": check_make,
    "python": check_script,
    "python3": check_script,
    **dict.fromkeys(("git", "cd", "pip", "cat", "echo", "jq", ".", "apt-get"), lambda words: ""),
}


def check(words: list[str]) -> str:
    """Return why a command cannot work, or ""; .venv/bin/python counts as python."""
    program = CHECKS.get(os.path.basename(words[0]))
    return program(words) if program else "a command this test does not know"


def complaints(line: str) -> list[str]:
    """Return what is wrong with a documented command line."""
    found = [(words, check(words)) for words in simple_commands(line)]
    return [f"{' '.join(words)}: {why}" for words, why in found if why]


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_parse(page: str) -> None:
    commands = fenced_commands((ROOT / page).read_text())
    assert commands, f"no ```sh block in {page}"
    assert not [why for line in commands for why in complaints(line)]


@pytest.mark.parametrize(
    "line",
    [
        "make everything",
        "pi-run --no-such-flag",
        "cat x | pi-bench --nope",
        "python benchmarks/none.py",
    ],
)
def test_wrong_commands_are_seen(line: str) -> None:
    assert complaints(line)


def test_readme_shows_the_two_commands() -> None:
    commands = fenced_commands(README.read_text())
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in commands}


def test_readme_python_runs(libpi, synthetic_gguf, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert "demo/smollm2.gguf" in code
    exec(code.replace("demo/smollm2.gguf", str(synthetic_gguf())), {})
    assert capsys.readouterr().out
