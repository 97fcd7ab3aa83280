"""A dataclass as the schema of a YAML file and of flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
import yaml

from powerinfer_toolkit import settings
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting


@dataclass(frozen=True)
class Part:
    name: str = setting("", "a name")
    weight: float | None = setting(None, "a weight")


@dataclass(frozen=True)
class Example:
    rate: float = setting(1e-3, "a rate, in %")
    steps: int = setting(10, "a number")
    kind: str = setting("plain", "a kind", choices=("plain", "fancy"))
    path: str | None = setting(None, "a path")
    fast: bool = setting(False, "a switch")
    maybe: bool | None = setting(None, "a switch that may be unset")
    parts: list[Part] = setting([], "parts")
    names: list[str] = setting(["a"], "names")
    numbers: dict[str, float] = setting({}, "numbers")


def parse(*argv: str) -> dict[str, str]:
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, Example)
    return settings.given_flags(parser.parse_args(argv), Example)


def resolve(text: str = "", *argv: str) -> Example:
    return settings.resolve(Example, yaml.safe_load(text) or {}, parse(*argv), "a.yaml")


def test_flag_before_file_before_default():
    assert resolve() == Example()
    assert resolve("{rate: 1e-4, steps: 3}", "--steps", "4") == Example(rate=1e-4, steps=4)


def test_every_kind_of_value():
    found = resolve(
        "{kind: fancy, path: x, maybe: true, parts: [{name: p, weight: 2}, {}], numbers: {min: 1}}",
        "--fast",
        "--names",
        "[b, c]",
    )
    parts = [Part("p", 2.0), Part()]
    assert found == Example(
        kind="fancy",
        path="x",
        fast=True,
        maybe=True,
        parts=parts,
        names=["b", "c"],
        numbers={"min": 1},
    )
    assert resolve("", "--fast", "false", "--names", "b") == Example(names=["b"])
    assert resolve("", "--path", "1e3").path == "1e3"
    assert resolve("{steps: 1e3}").steps == 1000


def test_saved_settings_read_back():
    found = resolve("{parts: [{name: é, weight: 2}], path: x}", "--rate", "3e-5")
    assert resolve(settings.to_yaml(found)) == found


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{stepz: 1}", "a.yaml: unknown key stepz", "did you mean steps?"),
        ("{zzz: 1}", "unknown key zzz", "known keys: rate, steps"),
        ("{parts: [{wieght: 1}]}", r"a.yaml: parts\[0\]: unknown key wieght", "weight"),
        ("{kind: odd}", "kind is 'odd'", "choose plain, fancy"),
        ("{steps: 1.5}", "steps is 1.5, not integer", ""),
        ("{steps: .nan}", "not integer", ""),
        ("{steps: true}", "not integer", ""),
        ("{rate: fast}", "rate is 'fast', not number", ""),
        ("{fast: 1}", "fast is 1, not true", ""),
        ("{steps: null}", "steps has no value", ""),
        ("{parts: 3}", "parts is 3, not a list", ""),
        ("{parts: [3]}", "not a mapping", ""),
        ("{numbers: [3]}", "not a mapping", ""),
    ],
)
def test_faulty_values(text, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        resolve(text)
    assert hint in caught.value.hint


def test_faulty_flags():
    with pytest.raises(UsageError, match="flags: steps is 'x'"):
        resolve("", "--steps", "x")
    with pytest.raises(UsageError, match="--parts: "):
        resolve("", "--parts", "[")


def test_files(tmp_path):
    path = tmp_path / "a.yaml"
    with pytest.raises(UsageError, match="there is no file"):
        settings.read_yaml(path, "example")
    for content, expected in (
        ("", {}),
        ("steps: 3", {"steps": 3}),
        ("other: {a: 1}\nexample: {steps: 3}", {"steps": 3}),
    ):
        path.write_text(content)
        assert settings.read_yaml(path, "example") == expected
    for content in ("[1]", "a: [", "example: {a: 1, b"):
        path.write_text(content)
        with pytest.raises(UsageError):
            settings.read_yaml(path, "example")


def test_differing_keys():
    old, new = {"a": 1, "b": 2, "d": None}, {"a": 1, "b": 3, "c": 4}
    assert settings.differing_keys(old, new) == ["b", "c", "d"]


def test_help_names_defaults(capsys):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, Example)
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    text = capsys.readouterr().out
    assert "a rate, in % (0.001)" in text
    assert "plain|fancy" in text
