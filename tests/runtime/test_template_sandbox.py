"""Hostile chat templates are errors, in bounded time and memory; what happens to the process they run in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parity import synthetic
from powerinfer_toolkit import console
from powerinfer_toolkit.errors import ExitCode, PiError
from powerinfer_toolkit.runtime import cli
from powerinfer_toolkit.runtime.chat_template import ChatTemplate
from powerinfer_toolkit.runtime.template_process import TemplateLimits, TemplateProcess

LIMITS = TemplateLimits(characters=10_000, cpu_seconds=0.2, wall_seconds=3, memory_bytes=256 << 20)
# What a kill costs at most, on a busy machine: the time limit, the process's end and its start anew.
ATTACK_SECONDS = LIMITS.wall_seconds + 5


@pytest.fixture(scope="module")
def sandbox() -> TemplateProcess:
    return TemplateProcess(LIMITS)


def render(sandbox: TemplateProcess, template: str, **variables: Any) -> str:
    messages = [{"role": "user", "content": "Hi"}]
    return ChatTemplate(template, process=sandbox).render(messages, special_tokens={}, **variables)


NOTHING = "namespace(x=[], y=[], n=3, s='ab')"
SHARED_LISTS = (
    f"{{% set ns = {NOTHING} %}}"
    "{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
ATTACKS = {
    "failed": [  # Python's internals, files, and plain mistakes
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ dict(a=1).__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': messages}) }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('true') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.system('true') }}",
        "{% for",
        "{{ 1 // 0 }}",
        "{{ messages[9].content }}",
        "{{ range(10 ** 9) }}",
        "{{ 10 ** 9999 }}",
        "{{ '%c' % 1114112 }}",
        "{% for i in range(9) %}" * 60 + "{% endfor %}" * 60,
    ],
    "calls itself without end": [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}",
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if a %}" * 5_000,
        f"{{% set ns = {NOTHING} %}}{{% for i in range(9999) %}}{{% set ns.x = [ns.x] %}}{{% endfor %}}{{{{ ns.x }}}}",
    ],
    "writes more than 10000 characters": [
        "{{ 'a' * 10001 }}",
        "{% for i in range(99999) %}xxxxxxxxxx{% endfor %}",
        "{% set x = 'a' * 9000 %}{{ x }}{{ x }}",
        "x" * 10_001,
        "{{ messages | pprint * 999 }}",
    ],
    "needs more memory": [
        "{{ 'a'.ljust(10 ** 11) }}",
        "{{ 'a'.zfill(10 ** 9) | length }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x' | indent(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%.999999999f' % 1.0 }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '%0999999999d' | format(1) }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
        "{{ range(99999) | map('string') | join('x' * 99999) | length }}",
    ],
    "": [  # whichever of time and memory ends first
        f"{{% set ns = {NOTHING} %}}{{% for i in range(60) %}}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}",
        f"{{% set ns = {NOTHING} %}}{{% for i in range(60) %}}{{% set ns.s = ns.s + ns.s %}}{{% endfor %}}",
        SHARED_LISTS + "{{ ns.x }}",
        SHARED_LISTS + "{{ ns.x | tojson }}",
        "{{ strftime_now('%Y' * 10 ** 8) }}",
        "{% autoescape true %}{{ '<' * 10 ** 8 }}{% endautoescape %}",
        "{{ 1" + " + 1" * 50_000 + " }}",
        "{{ x" + " | upper" * 20_000 + " }}",
    ],
    "takes more than 0.2 s": [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        f"{{% set ns = {NOTHING} %}}{{% for i in range(64) %}}{{% set ns.n = ns.n * ns.n %}}{{% endfor %}}",
        "{{ 2 ** 999999999 }}",
        SHARED_LISTS + "{{ ns.x == ns.y }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{% set x = 'a' * 10 ** 7 %}{% for i in range(99999) %}{% if x ~ i in x %}{% endif %}{% endfor %}",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "message"),
    [(template, message) for message, group in ATTACKS.items() for template in group],
    ids=lambda text: text[:40],
)
def test_attacks_and_mistakes_are_errors(
    template: str, message: str, sandbox: TemplateProcess
) -> None:
    begin = time.monotonic()
    with pytest.raises(PiError, match="chat template failed") as caught:
        render(sandbox, template)
    assert time.monotonic() - begin < ATTACK_SECONDS
    assert message in caught.value.message
    assert caught.value.message.isprintable()
    assert render(sandbox, "{{ messages[0].content }}") == "Hi"


def test_an_attack_off_the_main_thread_ends_too(sandbox: TemplateProcess) -> None:
    failures: list[PiError] = []

    def attack() -> None:
        try:
            render(sandbox, ATTACKS["takes more than 0.2 s"][0])
        except PiError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * ATTACK_SECONDS)
    assert [failure.message[-22:] for failure in failures] == ["it takes more than 0.2 s"[-22:]] * 3


def test_a_template_cannot_write_to_the_terminal(sandbox: TemplateProcess) -> None:
    with pytest.raises(PiError) as caught:
        render(sandbox, "{{ raise_exception('\x1b[31m a\n\tb' ~ 'x' * 10 ** 6) }}")
    assert "[31m a bxxx" in caught.value.message
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


def test_what_fits_the_limits_passes(sandbox: TemplateProcess) -> None:
    assert render(sandbox, "{{ 'a' * 10000 }}") == "a" * 10_000
    assert render(sandbox, "{{ text }}", text="\U0001f600" * 10_000) == "\U0001f600" * 10_000
    assert len(render(sandbox, "{{ text | length }}", text="é" * 1_000_000)) == 7


def test_values_must_be_json(sandbox: TemplateProcess) -> None:
    with pytest.raises(PiError, match="JSON"):
        render(sandbox, "{{ x }}", x=object())


def children() -> list[int]:
    """Process ids of this process's children."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(text) for file in files for text in file.read_text().split()]


@pytest.fixture
def fresh() -> tuple[TemplateProcess, int]:
    """A sandbox of its own and its process id."""
    before = children()
    process = TemplateProcess(LIMITS)
    render(process, "")
    (pid,) = set(children()) - set(before)
    return process, pid


def test_a_process_that_died_is_replaced(fresh: tuple[TemplateProcess, int]) -> None:
    sandbox, pid = fresh
    os.kill(pid, signal.SIGKILL)
    for _ in range(100):  # the kernel takes a moment
        if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.02)
    assert render(sandbox, "{{ 1 + 1 }}") == "2"


def test_a_process_that_hangs_is_replaced(fresh: tuple[TemplateProcess, int]) -> None:
    sandbox, pid = fresh
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PiError, match="takes more than"):
        render(sandbox, "{{ 1 + 1 }}")
    assert pid not in children()
    assert render(sandbox, "{{ 1 + 1 }}") == "2"


def test_the_process_ends_with_its_owner() -> None:
    before = set(children())
    sandbox = TemplateProcess(LIMITS)
    sandbox.start()
    render(sandbox, "")
    assert len(set(children()) - before) == 1
    del sandbox
    assert set(children()) <= before


def test_a_fork_starts_its_own(sandbox: TemplateProcess) -> None:
    render(sandbox, "")
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if render(sandbox, "{{ 1 + 1 }}") == "2" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert render(sandbox, "{{ 2 + 2 }}") == "4"


def test_a_python_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(PiError, match="cannot start the process"):
        ChatTemplate("", process=TemplateProcess(LIMITS))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PiError, match="did not start"):
        render(TemplateProcess(LIMITS), "")


@pytest.mark.resources
def test_limits_of_the_user_stay(fresh: tuple[TemplateProcess, int]) -> None:
    """The process lowers its limits and never asks for more than it was given."""
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (200 << 20, 200 << 20))\n"
        "from powerinfer_toolkit.runtime.template_process import *\n"
        "print(TemplateProcess(TemplateLimits()).render('{{ 1 + 1 }}', {}))\n"
    )
    environment = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.stdout == "2\n", done.stderr
    limits = Path(f"/proc/{fresh[1]}/limits").read_text()
    assert re.search(rf"Max address space +{LIMITS.memory_bytes} +{LIMITS.memory_bytes} ", limits)
    assert re.search(r"Max file size +0 +0 ", limits)


@pytest.mark.resources
def test_an_ordinary_chat_starts_fast() -> None:
    def seconds() -> float:
        begin = time.perf_counter()
        render(TemplateProcess(TemplateLimits()), "{{ messages[0].content }}")
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(5)) < 0.5


WORDS = st.sampled_from(
    ["messages", "m", "m.content", "m['role']", "1", "10 ** 9", "'a'", "[", "]", "(", ")", "{", "}", "|", "~", "*",
     "+", "==", "in", "loop.index", "range(9)", "length", "trim", "tojson", "join('x' * 99)", "default", "first",
     "map('upper')", "sort", "namespace(a=1)", "ns.a", "ns", "bos_token", "raise_exception('x')", "undefined",
     "none", "'\\x1b'", "strftime_now('%Y')", ":", ",", ".", "-", "not", "if", "else", "is", "defined", "%"]
)  # fmt: skip
EXPRESSIONS = st.lists(WORDS, max_size=8).map(" ".join)
PIECES = st.one_of(
    st.text(max_size=8),
    EXPRESSIONS.map("{{{{ {} }}}}".format),
    EXPRESSIONS.map("{{%- set ns = {} -%}}".format),
    st.sampled_from(["m", "loop", "m, n"]).map("{{% for {} in messages %}}".format),
    EXPRESSIONS.map("{{% if {} %}}".format),
    st.sampled_from(
        ["{% endfor %}", "{% endif %}", "{% else %}", "{% macro f(m) %}", "{% endmacro %}", "{{ f(f) }}",
         "{% break %}", "{% continue %}", "{% generation %}", "{% endgeneration %}", "{#", "#}", "{%", "{{"]
    ),
)  # fmt: skip


@given(pieces=st.lists(PIECES, max_size=8))
@example(pieces=["{{ '\ud800' }}"])
@settings(max_examples=400, deadline=None)
def test_any_template_gives_text_or_one_error(sandbox: TemplateProcess, pieces: list[str]) -> None:
    begin = time.monotonic()
    try:
        found = render(sandbox, "".join(pieces))
    except PiError as failure:
        found = failure.message
    assert time.monotonic() - begin < ATTACK_SECONDS
    assert len(found) <= LIMITS.characters


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "chat template failed: "),
        ("{{ 'a'.ljust(10 ** 11) }}", "it needs more memory"),
        ("{{ 2 ** 999999999 }}", "it takes more than 2 s"),
    ],
)
def test_pi_run_says_one_error_line(
    template: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(console, "_verbosity", console.NORMAL)  # -q stays otherwise
    shape = synthetic.Shape(n_layers=1)
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    path = tmp_path / "model.gguf"
    synthetic.write_gguf(path, shape, weights, keys={"tokenizer.chat_template": template})
    assert cli.main(["-q", "-m", str(path), "--chat", "-p", "hi", "-n", "1"]) == ExitCode.FAILURE
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first.startswith("error: the model's chat template failed: ")
    assert message in first
    assert second.startswith("hint: ")
