"""Chat templates render as in transformers; any messages give text or one error."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.chat_template import ChatTemplate
from powerinfer_toolkit.runtime.template_process import TemplateLimits, TemplateProcess
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.trained_tokenizers import TEMPLATE, train_byte_level

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
TURNS = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message.role == 'user' %}
[INST] {% if loop.first and system is defined %}<<SYS>>{{ system }}<</SYS>> {% endif %}{{ message.content }} [/INST]
    {%- else %}
 {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{% endfor %}"""
FEATURES = """{%- set ns = namespace(n=0, seen=[]) -%}
{% macro show(m) %}{{ m | tojson }}|{{ m | tojson(indent=2) }}{% endmacro %}
{% for message in messages %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
    {% if message.content == 'stop' %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
  {{ ns.n }} {{ show(message) }} {{ message.content.split(' ')[-1] | upper }}
{% endfor %}
{{ tools is none }} {{ documents is none }} {{ undefined_name }} {{ '<é>' | tojson }} {{ 'ab' * 3 }}"""
CONVERSATIONS = (
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "<a> & \"b\" 'é'\n\n"},
    ],
    [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "skip"},
        {"role": "user", "content": "stop"},
    ],
)
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}


def render(template: str, **options: Any) -> str:
    return ChatTemplate(template, **options).render([], special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_byte_level(tmp_path_factory.mktemp("bpe") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    values = {entry.name: entry.value for entry in tokenizer_metadata(folder, 1201).keys}
    return Tokenizer.from_metadata(values.get)


@pytest.mark.parametrize("template", [SMOLLM2, TEMPLATE, TURNS, FEATURES])
def test_templates_render_as_in_transformers(
    template: str, folder: Path, tokenizer: Tokenizer
) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for messages in CONVERSATIONS:
        for add_generation_prompt in (True, False):
            expected = reference.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
            found = ChatTemplate(template).render(
                messages,
                special_tokens=tokenizer.special_tokens,
                add_generation_prompt=add_generation_prompt,
            )
            assert found == expected


def test_a_template_knows_the_time_here(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "%Y-%m-%d %H:%M:%S"
    before = datetime.now().strftime(layout)
    found = render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    assert before <= found <= datetime.now().strftime(layout)
    days = []
    for zone in ("EAST-12", "WEST+12"):
        monkeypatch.setenv("TZ", zone)
        days.append(render("{{ strftime_now('%d') }}", process=TemplateProcess(TemplateLimits())))
    assert days[0] != days[1]


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(PiError, match="roles must alternate"):
        ChatTemplate(TURNS).render([{"role": "assistant", "content": "x"}], special_tokens=SPECIAL)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ChatTemplate(SMOLLM2).render(messages, special_tokens=SPECIAL)
    assert messages == [{"role": "user", "content": "Hi"}]


CONTENTS = st.one_of(
    st.none(), st.text(max_size=20), st.lists(st.dictionaries(st.text(), st.text()))
)


@given(
    messages=st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "x"]), CONTENTS), max_size=4
    ),
    template=st.sampled_from([SMOLLM2, TEMPLATE, TURNS, FEATURES]),
)
@settings(max_examples=200, deadline=None)
def test_any_messages_give_text_or_one_error(template: str, messages: list[dict[str, Any]]) -> None:
    try:
        found = ChatTemplate(template).render(messages, special_tokens=SPECIAL)
    except PiError as failure:
        found = failure.message
    assert isinstance(found, str)
