from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.scripted.asked import EngineRefused
from gristmill.scripted.parsing import CallPiece, StreamParser, parse_message
from gristmill.scripted.sampling import Limits, sample
from gristmill.scripted.template import TemplateOptions, render
from gristmill.scripted.tokenizer import CONTROL_TOKENS, END_OF_TURN, the_tokenizer
from gristmill.scripted.train import main, train

THINKING = TemplateOptions(thinking_model=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(st.lists(st.one_of(TEXTS, st.sampled_from(CONTROL_TOKENS)), max_size=6).map("".join))
def test_ids_spell_the_text(text: str) -> None:
    """A prompt's ids that decode to another prompt would be captured as what the model saw."""
    tokenizer = the_tokenizer()
    ids = tokenizer.encode(text)
    spelled = "".join(part if part in CONTROL_TOKENS else unicodedata.normalize("NFC", part) for part in _pieces(text))
    assert tokenizer.decode(ids) == spelled
    assert all(0 <= token < tokenizer.size for token in ids)


def _pieces(text: str) -> list[str]:
    return re.split("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")", text)


def test_control_text_of_anybody_is_the_control_token() -> None:
    """A user who writes the end of a turn ends it, as with the real tokenizer."""
    tokenizer = the_tokenizer()
    assert tokenizer.control(END_OF_TURN) in tokenizer.encode(f"please <|im_end|> now {END_OF_TURN}")
    assert tokenizer.decode(tokenizer.encode(f"a{END_OF_TURN}<think>b"), skip=True) == "a<think>b"


def test_halves_spell_the_whole() -> None:
    """A split that changes the text is no other tokenisation of it."""
    tokenizer = the_tokenizer()
    for token in range(256, tokenizer.size):
        for left, right in tokenizer.halves(token):
            assert tokenizer.bytes_of(left) + tokenizer.bytes_of(right) == tokenizer.bytes_of(token)
    assert tokenizer.halves(tokenizer.control(END_OF_TURN)) == []
    # All but a few tokens can be sampled in halves, else splits would be rare.
    assert sum(bool(tokenizer.halves(token)) for token in range(256, 3256)) > 2900


def test_training_gives_the_same_tokens_on_any_machine(tmp_path: Path) -> None:
    """A vocabulary that cannot be made again is a file from nowhere."""
    words = ["low", "low", "lower", "lowest", "newer", "wider", "wider", "wider"]
    assert train([" ".join(words)], 6) == [b"er", b"lo", b"low", b" low", b" w", b" wi"]
    text = tmp_path / "a.txt"
    text.write_text(" ".join(words))
    out = tmp_path / "vocabulary.txt"
    assert main(["--merges", "6", "--out", str(out), str(text)]) == 0
    again = tmp_path / "again.txt"
    command = [sys.executable, "-m", "gristmill.scripted.train", "--merges", "6", "--out", str(again), str(text)]
    subprocess.run(command, check=True, capture_output=True)
    assert again.read_bytes() == out.read_bytes()
    assert out.read_text().splitlines()[1].startswith("# merges=6 texts=1 sha256=")


def test_training_stops_where_nothing_stands_twice() -> None:
    """A short text has no thousand tokens."""
    assert train(["abab"], 100) == [b"ab"]


def test_the_shipped_vocabulary_says_where_it_is_from() -> None:
    """Its texts' digest and the number of merges stand in it."""
    lines = files("gristmill.scripted").joinpath("data", "vocabulary.txt").read_text(encoding="ascii").splitlines()
    assert lines[0].endswith("made by gristmill.scripted.train")
    assert lines[1].startswith("# merges=3000 texts=26 sha256=")
    assert len(lines) == 3002
    assert len(set(lines)) == len(lines)


# ---- chat template -------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_prompt_of_a_conversation() -> None:
    """What the model sees decides the tokens of every row."""
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        user("Run"),
        {
            "role": "assistant",
            "content": "ok",
            "reasoning": "\nhm\n",
            "tool_calls": [{"id": "c", "function": {"name": "bash", "arguments": '{"a":1.0 ,"b":"\\u00e9"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "out"},
        {
            "role": "tool",
            "tool_call_id": "d",
            "content": [{"type": "text", "text": "o1"}, {"type": "text", "text": "o2"}],
        },
    ]
    text = render(messages, [], THINKING)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRun<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nok\n"
        '<tool_call>\n{"name": "bash", "arguments": {"a": 1.0, "b": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nout\n</tool_response>\n<tool_response>\no1\no2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_reasoning_before_the_last_user_message_is_dropped() -> None:
    """The largest source of drift with reasoning models."""
    said = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert "hm" not in render([user("1"), said, user("2")], [], THINKING)
    assert "<think>\nhm\n</think>\n\na" in render([user("1"), said], [], THINKING)
    assert "hm" not in render([user("1"), said], [], TemplateOptions())
    inside = {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}
    assert "hm" not in render([user("1"), inside, user("2")], [], THINKING)
    assert "hm" in render([user("1"), inside, user("<tool_response>\nx\n</tool_response>")], [], THINKING)


@pytest.mark.parametrize(
    ("arguments", "rendered"), [("", "{}"), ('{"a": "l', "{}"), ("[1]", "{}"), ({"b": 2}, '{"b": 2}')]
)
def test_arguments_that_cannot_be_read_are_empty(arguments: Any, rendered: str) -> None:
    """A broken call is rendered as an empty one, silently."""
    call = {"function": {"name": "bash", "arguments": arguments}}
    text = render([user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}], [], THINKING)
    assert f'"arguments": {rendered}}}' in text


def test_settings_of_the_template() -> None:
    """Thinking off, a prefill, and tools change the prompt."""
    off = render([user("x")], [], THINKING._replace(enable_thinking=False))
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    prefill = [user("x"), {"role": "assistant", "content": "Sure, the"}]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert render(prefill, [], options).endswith("<|im_start|>assistant\nSure, the")
    tools = render([{"role": "system", "content": "S"}, user("x")], [{"type": "function", "name": "é"}], THINKING)
    assert tools.startswith("<|im_start|>system\nS\n\n# Tools")
    assert '\n{"type": "function", "name": "é"}\n' in tools


def test_a_picture_is_refused() -> None:
    """A text model takes no images."""
    with pytest.raises(EngineRefused) as refused:
        render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], [], THINKING)
    assert refused.value.status == 400


# ---- sampling and parsing ------------------------------------------------------------------------------------------


@given(TEXTS, st.integers(0, 9), st.sampled_from([0.0, 0.3, 1.0]))
def test_pieces_add_up_to_the_text(text: str, seed: int, split: float) -> None:
    """A stream that loses half a character, or says it twice, is another reply."""
    sampled = sample(text, eos=True, seed=seed, split=split, limits=Limits(10_000))
    tokenizer = the_tokenizer()
    assert len(sampled.pieces) == len(sampled.ids)
    assert sampled.text == tokenizer.decode(sampled.ids, skip=True)
    assert sampled.ids[-1] == tokenizer.control(END_OF_TURN)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("split", [0.0, 0.7])
def test_a_stop_string_cuts_text_and_not_tokens(keep: bool, split: float) -> None:
    """All tokens of the stop string were sampled; the text ends before it."""
    limits = Limits(1000, stop=("zzz", " the"), keep_stop=keep)
    sampled = sample("to use the stones", eos=True, seed=1, split=split, limits=limits)
    assert (sampled.finish, sampled.stop_reason) == ("stop", " the")
    assert sampled.text == "to use" + " the" * keep
    assert the_tokenizer().decode(sampled.ids) == "to use the"


def test_other_ends_of_sampling() -> None:
    """Each end has its own finish reason and leaves other tokens."""
    text = "one two three four"
    ids = the_tokenizer().encode(text)
    assert sample(text, eos=True, seed=0, split=0, limits=Limits(3)).finish == "length"
    assert sample(text, eos=True, seed=0, split=0, limits=Limits(99, cut=2)).ids == tuple(ids[:2])
    stopped = sample(text, eos=True, seed=0, split=0, limits=Limits(99, stop_ids=frozenset({ids[2]})))
    assert (stopped.ids[-1], stopped.stop_reason) == (ids[2], ids[2])
    assert sample(text, eos=False, seed=0, split=0, limits=Limits(99)).finish == "length"


WHOLE = [
    "plain",
    "<think>\nhm\n</think>\n\ntext",
    "<think>never closed",
    "no tag at all </think>",
    '</think>a <b> <tool_call>\n{"name": "f", "arguments": {"x": "}{\\" <tool_call>"}}\n</tool_call>',
    'x<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": [1, {"a": 2}]}</tool_call>',
    "x <tool_cal",
]


@pytest.mark.parametrize("text", WHOLE)
@pytest.mark.parametrize("thinking", [False, True])
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_a_parsed_stream_adds_up_to_the_parsed_whole(text: str, thinking: bool, cuts: list[int]) -> None:
    """Where chunks end must not decide what the message is."""
    parser = StreamParser(thinking=thinking, tools=True)
    deltas, at, number = [], 0, 0
    while at < len(text):
        end = at + cuts[number % len(cuts)]
        deltas.append(parser.feed(text[at:end], final=end >= len(text)))
        at, number = end, number + 1
    whole = parse_message(text, thinking=thinking, tools=True)
    assert "".join(delta.reasoning for delta in deltas) == (whole.reasoning or "")
    content = "".join(delta.content for delta in deltas)
    assert content == (whole.content or "") or (whole.calls and content.strip() == (whole.content or ""))
    pieces: list[CallPiece] = [piece for delta in deltas for piece in delta.calls]
    names = [piece.name for piece in pieces if piece.name is not None]
    if "<tool_call>" in text and whole.calls:
        assert names == [name for name, _ in whole.calls]
        for index, (_, arguments) in enumerate(whole.calls):
            said = "".join(piece.arguments or "" for piece in pieces if piece.number == index)
            assert said == arguments
