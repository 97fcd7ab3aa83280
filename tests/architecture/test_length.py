"""Budgets of function and file length: Python by ast, C++ by following braces.

The budgets are the median and the 90th percentile of code bases that read well, see CONTRIBUTING.md.
"""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (
    "src/powerinfer_toolkit",
    "convert",
    "profile_activations",
    "train_predictor",
    "runtime",
    "recipes",
    "benchmarks",
    "docs",
)
NATIVE_SUFFIXES = {".cpp", ".h", ".inl", ".cu", ".cuh"}
MAX_MEDIAN, MAX_P90, MAX_FUNCTION, MAX_KERNEL, MAX_FILE = 15, 45, 80, 120, 400

Function = tuple[str, int, int]  # name or signature, first line, number of lines


def code_files(*folders: str) -> list[Path]:
    """Return the Python and native files of the folders; links are not followed."""
    suffixes = NATIVE_SUFFIXES | {".py"}
    files = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in files if path.suffix in suffixes and path.is_file())


def python_functions(source: str) -> Iterator[Function]:
    """Yield every function and method, docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1


def blank_non_code(source: str) -> str:
    """Replace comments, literals and preprocessor lines by blanks that keep the line breaks."""
    pattern = (
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:\\\n|[^\n])*'
    )
    flags = re.DOTALL | re.MULTILINE
    # A digit separator (10'000) is no character literal.
    source = re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", " ", source)
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found.group()), source, flags=flags)


SCOPE = re.compile(r"\b(namespace|struct|class|enum|union|extern)\b[^()=]*$")
BODY = re.compile(
    r"\)\s*(?:(?:const|noexcept|override|final|mutable|&&?)\s*|noexcept\s*\([^{}]*\)\s*)*"
    r"(?:->\s*[\w:<>,&*\s]+|:\s*\w.*)?$|\btry\s*$",
    re.DOTALL,
)


def cpp_functions(source: str) -> Iterator[Function]:
    """Yield the outermost functions: a brace that follows a parameter list, outside any other body."""
    text, line = "", 1  # since the last statement, and the line where it starts
    current = 1
    stack: list[tuple[str, str, int]] = []  # kind of each open brace, its text, its line
    for character in blank_non_code(source):
        current += character == "\n"
        if character == "{":
            inside = any(kind in ("body", "block") for kind, _, _ in stack)
            stack.append((brace_kind(text, inside), text, line))
            text = ""
        elif character == "}" and stack:
            kind, before, line = stack.pop()
            if kind == "body":
                yield " ".join(before.split()), line, current - line + 1
            text = before + "{}" if kind == "value" else ""
        elif character == ";":
            text = ""
        elif text or not character.isspace():
            line = line if text else current
            text += character


def brace_kind(text: str, inside_body: bool) -> str:
    """Say what an opening brace begins: a scope, a function's body, a block in one, or a value."""
    if inside_body or text.lstrip().startswith("catch"):
        return "block"
    if SCOPE.search(text):
        return "scope"
    member_initialiser = re.search(r"\)\s*:(?!:).*[\w>]$", text.rstrip(), re.DOTALL)
    return "body" if BODY.search(text.rstrip()) and not member_initialiser else "value"


def functions_of(path: Path) -> list[Function]:
    """Return the functions of one file."""
    measure = python_functions if path.suffix == ".py" else cpp_functions
    return list(measure(path.read_text()))


def is_kernel(path: Path) -> bool:
    """Kernel files hold unrolled inner loops and may be longer."""
    return {"kernels", "cuda"} & set(path.relative_to(ROOT).parts) != set()


@pytest.mark.parametrize("language", ["python", "native"])
def test_functions_are_short(language: str) -> None:
    files = [path for path in code_files(*SOURCE_FOLDERS) if "tests" not in path.parts]
    files = [path for path in files if (path.suffix == ".py") == (language == "python")]
    lengths = [n for path in files for _, _, n in functions_of(path)]
    assert len(lengths) >= 10, "the measure found too few functions to be right"
    assert statistics.median(lengths) <= MAX_MEDIAN
    assert statistics.quantiles(lengths, n=10)[-1] <= MAX_P90


def test_no_function_is_long() -> None:
    bad = []
    for path in code_files(*SOURCE_FOLDERS):
        limit = MAX_KERNEL if is_kernel(path) else MAX_FUNCTION
        for name, line, n in functions_of(path):
            if n > limit and "tests" not in path.parts:
                bad.append(f"{path}:{line}: {name} has {n} lines, at most {limit}")
    assert not bad, "\n".join(bad)


def test_no_file_is_long() -> None:
    files = code_files(*SOURCE_FOLDERS, "tests")
    counts = {path: len(path.read_text().splitlines()) for path in files}
    bad = [
        f"{path} has {n} lines, at most {MAX_FILE}" for path, n in counts.items() if n > MAX_FILE
    ]
    assert not bad, "\n".join(bad)


SAMPLE = """\
#define LOOP(n) for (int i = 0; i < (n); i++) { \\
    body(i); }
namespace pi {
struct Point {
    int x{0};
    Point(int a) : x{a}, y(2) { y = a; }
    int sum() const noexcept
    {
        return x + y; // }
    }
    int y;
};
static const int table[] = {1, 2, 3};
enum class Kind : int { one, two };
template <typename T>
auto twice(T value) -> T {
    auto f = [](int i) { return i; };
    if (value) {
        return f(value);
    }
    const char *s = "{";
    char c = '{';
    return value * 1'000;
}
Model::Model(const char *path)
    : file_(path), names_{"a"} {
    open();
}
int guarded() try {
    return 1;
} catch (...) {
    return 2;
}
extern "C" int last(void) { return 0; }
} // namespace pi
"""


def test_braces_are_followed() -> None:
    found = [(name.split("(")[0].split()[-1], n) for name, _, n in cpp_functions(SAMPLE)]
    expected = [("Point", 1), ("sum", 4), ("twice", 10), ("Model::Model", 4), ("guarded", 3)]
    assert found == [*expected, ("last", 1)]
