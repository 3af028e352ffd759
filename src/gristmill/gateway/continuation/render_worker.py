"""A process that renders conversations with a tokenizer and its chat template: `python -m …render_worker FOLDER`.

It reads questions from standard input and writes answers to standard output, each a JSON document behind its length in
4 bytes, little end first. The first answer says that the tokenizer is loaded, or why not. It ends with its input.

Invariant: a question is answered with the ids of its rendering, or with the reason why there are none. Nothing is
downloaded, and nothing of the folder is run but its template, in the sandbox of `transformers`.

Not here: what messages look like to a template (template_input), and who asks (local).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from gristmill.gateway.continuation.template_input import template_messages, template_tools

__all__ = ["LENGTH_bytes", "LocalTemplate", "RenderAnswer", "RenderQuestion", "framed", "main", "reads_parts"]

LENGTH_bytes: Final = 4

_CONTENT: Final = "content"
_SAID: Final = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
"""Parameters of `apply_chat_template` that a request may set; the other ones are not variables of a template."""
_generation_tag = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


class RenderQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation, as the Chat body has it; `settings` are the template's variables, generation prompt included."""

    number: int
    messages: list[Any]
    tools: list[Any] | None = None
    settings: dict[str, Any] = {}


class RenderAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ids of a rendering, or why there are none; `number` is the question's, -1 of the first answer."""

    number: int
    ids: list[int] | None = None
    error: str | None = None


class LocalTemplate:
    """A tokenizer and its chat template, from a folder.

    Args:
        folder: has `tokenizer.json`, `tokenizer_config.json`, and a chat template in it or beside it.

    Attributes:
        tokenizer: of `transformers`.

    Raises:
        ModuleNotFoundError: `transformers` or `jinja2` is not installed.
        ValueError: there is no chat template.
        OSError: there is no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        import_module("jinja2")
        transformers: Any = import_module("transformers")
        self.tokenizer: Final[Any] = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        parameters: frozenset[str] = frozenset(
            import_module("inspect").signature(self.tokenizer.apply_chat_template).parameters
        )
        self._reserved: Final = parameters - _SAID

    def ids(self, messages: Sequence[Any], tools: Sequence[Any] | None, settings: dict[str, Any]) -> list[int]:
        """Render and tokenise a conversation.

        Raises:
            Exception: whatever the template or the tokenizer raises.
        """
        return self.tokenizer(self.text(messages, tools, settings), add_special_tokens=False)["input_ids"]

    def text(self, messages: Sequence[Any], tools: Sequence[Any] | None, settings: dict[str, Any]) -> str:
        """Render a conversation; raises as `ids`."""
        given = template_tools(tools)
        template: str = self.tokenizer.get_chat_template(tools=given)
        developer = "'developer'" in template or '"developer"' in template
        return self.tokenizer.apply_chat_template(
            template_messages(messages, parts=reads_parts(template), developer=developer),
            tools=given,
            chat_template=template,
            tokenize=False,
            **{name: value for name, value in settings.items() if name not in self._reserved},
        )


@lru_cache(maxsize=16)
def reads_parts(template: str) -> bool:
    """Say whether a template goes through content part by part; engines give content as parts to those, else as text.

    Args:
        template: its source.
    """
    jinja: Any = import_module("jinja2")
    nodes: Any = import_module("jinja2.nodes")
    tree = jinja.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_generation_tag.sub("", template))
    names = {_CONTENT, *_content_names(tree, nodes)}
    return any(_is_content(loop.iter, names, nodes) for loop in tree.find_all(nodes.For))


def _content_names(tree: Any, nodes: Any) -> Iterator[str]:
    """Yield variables that content is assigned to, and parameters of macros that it is given to."""
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and _is_content(assigned.node, (), nodes):
            yield assigned.target.name
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, value in zip(macro.args, call.args, strict=False):
            if _is_content(value, (), nodes):
                yield parameter.name
        yield from (named.key for named in call.kwargs if _is_content(named.value, (), nodes))


def _is_content(node: Any, names: Any, nodes: Any) -> bool:
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    return isinstance(node, nodes.Getattr) and node.attr == _CONTENT


def framed(document: msgspec.Struct) -> bytes:
    """Return a document behind its length."""
    encoded = msgspec.json.encode(document)
    return len(encoded).to_bytes(LENGTH_bytes, "little") + encoded


def _questions(source: BinaryIO) -> Iterator[RenderQuestion]:
    decode = msgspec.json.Decoder(RenderQuestion).decode
    while len(length := source.read(LENGTH_bytes)) == LENGTH_bytes:
        yield decode(source.read(int.from_bytes(length, "little")))


def _answer(template: LocalTemplate, question: RenderQuestion) -> RenderAnswer:
    try:
        ids = template.ids(question.messages, question.tools, question.settings)
    except Exception as error:  # noqa: BLE001 - the boundary: a template raises what it likes
        return RenderAnswer(number=question.number, error=f"{type(error).__name__}: {error}"[:500])
    return RenderAnswer(number=question.number, ids=ids)


def main(folder: Path, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer questions until there are no more."""
    try:
        template = LocalTemplate(folder)
    except Exception as error:  # noqa: BLE001 - the boundary: a folder holds what it likes
        sink.write(framed(RenderAnswer(number=-1, error=f"{type(error).__name__}: {error}"[:500])))
        sink.flush()
        return
    sink.write(framed(RenderAnswer(number=-1, ids=[])))
    sink.flush()
    for question in _questions(source):
        sink.write(framed(_answer(template, question)))
        sink.flush()


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    answers = os.fdopen(os.dup(1), "wb")
    # What a library says on standard output would stand between answers.
    os.dup2(2, 1)
    main(Path(sys.argv[1]), sys.stdin.buffer, answers)
