from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gristmill.gateway.continuation.render_worker import (
    LENGTH_bytes,
    LocalTemplate,
    RenderAnswer,
    RenderQuestion,
    framed,
    main,
    reads_parts,
)
from tests.gateway.continuation.tiny_tokenizer import CHAT, PARTS, save_tokenizer

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "mend the mill"}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a":"é"}'}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def answers(folder: Path, *questions: RenderQuestion) -> list[RenderAnswer]:
    sink = io.BytesIO()
    main(folder, io.BytesIO(b"".join(map(framed, questions))), sink)
    written, found = sink.getvalue(), list[RenderAnswer]()
    while written:
        end = LENGTH_bytes + int.from_bytes(written[:LENGTH_bytes], "little")
        found.append(msgspec.json.decode(written[LENGTH_bytes:end], type=RenderAnswer))
        written = written[end:]
    return found


def test_a_rendering(folder: Path) -> None:
    """The template sees what engines show it, and control tokens are tokens."""
    template = LocalTemplate(folder)
    messages = [USER, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]}]
    text = template.text(messages, None, {"add_generation_prompt": True, "enable_thinking": False})
    assert text == (
        "<|bos|><|turn|>user\nmend the mill<|end|>\n<|turn|>assistant\n<think>\nhm\n</think>\n\n"
        '<call>bash {"a": "é"}</call><|end|>\n<|turn|>assistant\n<think>\n\n</think>\n\n'
    )
    ids = template.ids(messages, None, {"add_generation_prompt": True, "enable_thinking": False})
    assert ids[:2] == [0, 1]
    assert ids.count(2) == 2
    assert '{"type": "function"' in template.text([USER], [{"function": {"name": "bash"}}], {})


def test_what_a_request_may_not_say(folder: Path) -> None:
    """Variables of a template come from the harness; parameters of the library that renders it must not."""
    template = LocalTemplate(folder)
    said = template.ids([USER], None, {"add_generation_prompt": True})
    reserved: Json = {"tokenize": True, "chat_template": "x", "padding": True, "max_length": 1, "truncation": True}
    assert template.ids([USER], None, {"add_generation_prompt": True, **reserved}) == said


def test_questions_and_answers(folder: Path) -> None:
    """A conversation that a template refuses costs no other one its rendering."""
    found = answers(
        folder,
        RenderQuestion(number=1, messages=[USER]),
        RenderQuestion(number=2, messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        RenderQuestion(number=3, messages=[USER], settings={"add_generation_prompt": True}),
    )
    assert found[0] == RenderAnswer(number=-1, ids=[])
    assert [answer.number for answer in found[1:]] == [1, 2, 3]
    assert found[1].ids is not None
    assert found[2].error == "UnrenderableMessageError: messages[0].content[0]: expected a text part, got 'image_url'"
    assert found[3].ids is not None
    assert found[3].ids[: len(found[1].ids)] == found[1].ids


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    """Said at once, not with the first call."""
    [first] = answers(save_tokenizer(tmp_path, None), RenderQuestion(number=1, messages=[USER]))
    assert first == RenderAnswer(number=-1, error="ValueError: the tokenizer has no chat template")
    [first] = answers(tmp_path / "none", RenderQuestion(number=1, messages=[USER]))
    assert first.error is not None


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (CHAT, False),
        (PARTS, True),
        ("{% for m in messages %}{% for p in m['content'] | reverse %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c[1:] %}{{ p }}{% endfor %}{% endfor %}", True),
        (
            "{% macro show(value) %}{% for p in value %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(value) %}{% for p in value %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(value=m.content) }}{% endfor %}",
            True,
        ),
        (
            "{% macro show(value) %}{% for p in value %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ m.content + show(m.tools) + other(m.content) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", False),
    ],
)
def test_which_templates_read_parts(template: str, parts: bool) -> None:
    """The wrong form of content renders as nothing, or as a list in brackets."""
    assert reads_parts(template) is parts


def test_parts(tmp_path: Path) -> None:
    """A template that reads parts is given them."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = LocalTemplate(save_tokenizer(tmp_path, PARTS))
    assert template.text([{"role": "user", "content": content}], None, {}) == "<|turn|>user\n(a)(b)<|end|>\n"
