"""Settings of a command: one dataclass is the schema of a flat YAML file and of the flags.

Every field is a key of the file and a flag of the same name; a flag wins over the file, the file over the
default. Keys that do not exist, and values of a wrong type, are a UsageError that names the nearest key.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from powerinfer_toolkit.errors import UsageError

S = TypeVar("S")
CHOICES, HELP, SHORT = "choices", "help", "short"


def setting(default: Any, help: str, *, choices: Sequence[str] = (), short: str = "") -> Any:  # noqa: ANN401 - as dataclasses.field
    """Return a dataclass field with a default (lists and dicts are copied), help, choices and a short flag."""
    metadata = {HELP: help, CHOICES: tuple(choices), SHORT: short}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, schema: type, section: str = "") -> None:
    """Add a flag for every field of `schema`; a flag that is not given leaves no trace in the namespace.

    Lists and mappings are written as YAML; a boolean flag without a value means true. With a section the flags
    are --section.key, and --help leaves them to the section's own command.
    """
    group = parser.add_argument_group("settings, as flags or as keys of the file")
    for field, kind in _fields(schema):
        default = _default(field)
        text = field.metadata[HELP] + ("" if default in (None, "", [], {}) else f" ({default})")
        choices = field.metadata[CHOICES]
        switch: dict[str, Any] = (
            {"nargs": "?", "const": "true"} if bool in _alternatives(kind) else {}
        )
        short = field.metadata[SHORT]
        group.add_argument(
            *([short] if short and not section else []),
            f"--{_flag(field.name, section)}",
            default=argparse.SUPPRESS,
            metavar="|".join(choices) if choices else _kind_name(kind).upper(),
            help=argparse.SUPPRESS if section else text.replace("%", "%%"),
            **switch,
        )


def given_flags(args: argparse.Namespace, schema: type, section: str = "") -> dict[str, str]:
    """Return the settings that were given as flags, as text."""
    flags = {name: _flag(name, section) for name in keys(schema)}
    return {name: getattr(args, flag) for name, flag in flags.items() if hasattr(args, flag)}


def _flag(name: str, section: str) -> str:
    return f"{section}.{name}" if section else name


def keys(schema: type) -> list[str]:
    """Return the names of the settings."""
    return [field.name for field, _ in _fields(schema)]


def read_yaml(path: Path, section: str = "") -> dict[str, Any]:
    """Return the mapping in a YAML file, or in its section of that name if it has one. Raises UsageError.

    A recipe holds one section a stage; a file for one command holds the keys alone.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as failure:
        raise UsageError(f"there is no file {path}", hint="name a YAML file") from failure
    except (yaml.YAMLError, UnicodeDecodeError) as failure:
        raise UsageError(
            f"{path} is not YAML: {failure}",
            hint="look at the line named; texts with colons or hashes need quotes",
        ) from failure
    if content is None:
        return {}
    if isinstance(content, dict) and isinstance(content.get(section), dict):
        content = content[section]
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no mapping", hint="write one `key: value` a line")
    return content


def resolve(
    schema: type[S],
    values: Mapping[str, Any],
    flags: Mapping[str, Any],
    where: str,
    section: str = "",
) -> S:
    """Return the settings of `values` (from `where`) with `flags` before them. Raises UsageError.

    What is wrong with the settings of a section is said with the section's name: others have the same keys.
    """
    converted = _convert_all(schema, values, where)
    where_flags = f"flags: {section}" if section else "flags"
    for name, text in flags.items():
        value = _parse_flag(schema, name, text, section)
        converted |= _convert_all(schema, {name: value}, where_flags)
    try:
        return schema(**converted)
    except UsageError as failure:
        if section:
            raise UsageError(f"{section}: {failure.message}", hint=failure.hint) from failure
        raise


def to_yaml(settings: Any) -> str:  # noqa: ANN401 - any dataclass
    """Return every setting, defaults included, as the YAML that `resolve` reads."""
    return dump_yaml(to_mapping(settings))


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Return a mapping of plain values as YAML, in its order."""
    import yaml

    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    return text


def to_mapping(settings: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass
    """Return the settings as plain values."""
    return dataclasses.asdict(settings)


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, or that only one of the mappings has."""
    names = [*new, *(name for name in old if name not in new)]
    return [
        name for name in names if old.get(name) != new.get(name) or (name in old) != (name in new)
    ]


def _fields(schema: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return the fields with their evaluated types."""
    kinds = typing.get_type_hints(schema)
    return [(field, kinds[field.name]) for field in dataclasses.fields(schema)]


def _default(field: dataclasses.Field[Any]) -> Any:  # noqa: ANN401
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _convert_all(schema: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `values` in the types of the schema's fields."""
    fields = {field.name: (field, kind) for field, kind in _fields(schema)}
    converted = {}
    for name, value in values.items():
        if name not in fields:
            raise unknown_key(str(name), fields, where)
        field, kind = fields[name]
        converted[name] = _convert(value, kind, f"{where}: {name}")
        choices = field.metadata.get(CHOICES, ())
        if choices and converted[name] is not None and converted[name] not in choices:
            raise UsageError(f"{where}: {name} is {value!r}", hint=f"choose {', '.join(choices)}")
    return converted


def unknown_key(name: str, known: Iterable[str], where: str) -> UsageError:
    """Return the error of a key that does not exist; its hint is the nearest one that does."""
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return UsageError(f"{where}: unknown key {name}", hint=hint)


def _parse_flag(schema: type, name: str, text: str, section: str) -> Any:  # noqa: ANN401
    """Return a flag's value: text as it is for text, YAML for everything else."""
    kind = dict((field.name, kind) for field, kind in _fields(schema))[name]
    if str in _alternatives(kind):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as failure:
        raise UsageError(
            f"--{_flag(name, section)}: {text!r} is not YAML: {failure}",
            hint="texts with colons or brackets need quotes of their own: '\"...\"'",
        ) from failure


def _alternatives(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return the members of a union, or the type itself."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _convert(value: Any, kind: Any, where: str) -> Any:  # noqa: ANN401
    """Return `value` as `kind`: bool, int, float, str, None, list[...], dict[str, ...] or a dataclass."""
    options = _alternatives(kind)
    if value is None:
        if type(None) in options:
            return None
        raise UsageError(
            f"{where} has no value", hint="write the value after the colon, or leave the line out"
        )
    (kind,) = (option for option in options if option is not type(None))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise UsageError(
                f"{where} is {value!r}, not a mapping",
                hint="write it as key: value lines, one a setting",
            )
        return kind(**_convert_all(kind, value, where))
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        if item is str and isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise UsageError(
                f"{where} is {value!r}, not a list", hint="write it as lines that begin with a dash"
            )
        return [_convert(entry, item, f"{where}[{i}]") for i, entry in enumerate(value)]
    if typing.get_origin(kind) is dict:
        return _convert_mapping(value, kind, where)
    return _convert_scalar(value, kind, where)


def _convert_mapping(value: Any, kind: Any, where: str) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(value, dict):
        raise UsageError(
            f"{where} is {value!r}, not a mapping",
            hint="write it as key: value lines, one a setting",
        )
    _, item = typing.get_args(kind)
    return {str(name): _convert(entry, item, f"{where}.{name}") for name, entry in value.items()}


def _convert_scalar(value: Any, kind: type, where: str) -> Any:  # noqa: ANN401
    """Return a scalar; 1e-3, which YAML 1.1 takes for text, is a number where a number is wanted."""
    failure = UsageError(
        f"{where} is {value!r}, not {_kind_name(kind)}",
        hint="docs/training.md and docs/recipes.md list every setting",
    )
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise failure
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise failure
    try:
        number = float(value)
    except (ValueError, OverflowError):  # an integer may have more digits than a float holds
        raise failure from None
    if math.isnan(number):  # no comparison with a limit would refuse it
        raise failure
    if kind is float:
        return number
    if not number.is_integer():  # nor are infinity and nan
        raise failure
    return int(number)


def _kind_name(kind: Any) -> str:  # noqa: ANN401
    names = {bool: "true|false", int: "integer", float: "number", str: "text"}
    (kind,) = (option for option in _alternatives(kind) if option is not type(None))
    return names.get(kind, "yaml")
