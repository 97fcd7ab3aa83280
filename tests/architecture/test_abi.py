"""The ctypes table against pi.h: names, types, struct layouts and the ABI number."""

from __future__ import annotations

import ctypes as ct
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from powerinfer_toolkit.runtime import native_lib

HEADER = Path(__file__).parents[2] / "runtime" / "native" / "include" / "pi.h"
SCALARS = {
    "void": None,
    "pi_status": ct.c_int32,
    "int32_t": ct.c_int32,
    "int64_t": ct.c_int64,
    "uint8_t": ct.c_uint8,
    "uint32_t": ct.c_uint32,
    "uint64_t": ct.c_uint64,
    "float": ct.c_float,
    "pi_log_fn": native_lib.LogFn,
    "pi_abort_fn": native_lib.AbortFn,
}
OPAQUE = {"pi_model", "pi_engine", "pi_sampler"}


def header_text() -> str:
    text = HEADER.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", " ", text, flags=re.MULTILINE)


def ctypes_of(declaration: str):
    """The ctypes type of a C type such as `const float **`."""
    base = re.sub(r"\bconst\b|\*", " ", declaration).strip()
    stars = declaration.count("*")
    if base in OPAQUE:
        base = "void"
    if base == "char":
        kind, stars = ct.c_char_p, stars - 1
    elif base == "void" and stars:
        kind, stars = ct.c_void_p, stars - 1
    elif base in native_lib.STRUCTS:
        kind = native_lib.STRUCTS[base]
    else:
        kind = SCALARS[base]
    for _ in range(stars):
        kind = ct.POINTER(kind)
    return kind


def split_parameter(parameter: str) -> str:
    """`const float *x` -> `const float *`; the name is the last word."""
    return re.sub(r"\w+\s*$", "", parameter.strip()).strip()


def header_functions() -> dict[str, tuple[object, list[object]]]:
    found = {}
    for result, name, parameters in re.findall(
        r"PI_API\s+([\w\s]+?[\s*]+)(pi_\w+)\s*\(([^)]*)\)\s*;", header_text()
    ):
        listed = [] if parameters.strip() == "void" else parameters.split(",")
        found[name] = (
            ctypes_of(result.strip()),
            [ctypes_of(split_parameter(item)) for item in listed],
        )
    return found


def header_structs() -> dict[str, list[tuple[str, object]]]:
    found = {}
    for body, name in re.findall(
        r"typedef struct \w+ \{(.*?)\}\s*(pi_\w+)\s*;", header_text(), flags=re.DOTALL
    ):
        fields = []
        for declaration in body.split(";"):
            if not declaration.strip():
                continue
            parts = re.fullmatch(r"(.*?)(\w+)\s*(?:\[(\d+)\])?", declaration.strip(), re.DOTALL)
            kind = ctypes_of(parts[1].strip())
            fields.append((parts[2], kind * int(parts[3]) if parts[3] else kind))
        found[name] = fields
    return found


def test_every_function_is_declared_with_the_header_types():
    declared = header_functions()
    assert len(declared) == header_text().count("PI_API")
    assert declared == native_lib.PROTOTYPES


def test_every_struct_has_the_header_fields():
    assert header_structs() == {
        name: list(kind._fields_) for name, kind in native_lib.STRUCTS.items()
    }


def test_abi_number_matches():
    number = re.search(r"#define PI_ABI_VERSION (\d+)u", HEADER.read_text(encoding="utf-8"))
    assert int(number[1]) == native_lib.ABI_VERSION


def test_library_agrees_with_the_package(libpi):
    assert libpi.pi_abi_version() == native_lib.ABI_VERSION


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("cc")
    if not found:
        pytest.skip("no C compiler")
    return found


def test_struct_layouts_match_the_compiler(compiler, tmp_path):
    lines = []
    expected = {}
    for name, kind in native_lib.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected[name] = ct.sizeof(kind)
        for field, *_ in kind._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected[f"{name}.{field}"] = getattr(kind, field).offset
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <pi.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\nreturn 0; }\n"
    )
    program = tmp_path / "layout"
    subprocess.run(
        [compiler, "-std=c11", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True
    )
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert {line.split()[0]: int(line.split()[1]) for line in printed.splitlines()} == expected


def test_header_is_pedantic_c11(compiler):
    command = [compiler, "-std=c11", "-pedantic", "-Wall", "-Werror", "-fsyntax-only", "-x", "c"]
    subprocess.run([*command, str(HEADER)], check=True)
