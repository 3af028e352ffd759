"""A folder with a tokenizer of some hundred entries and a chat template of our own, as engines are given them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["CHAT", "CONTROLS", "PARTS", "save_tokenizer"]

CONTROLS = ("<|bos|>", "<|turn|>", "<|end|>", "<think>", "</think>", "<call>", "</call>")

CHAT = """{{- '<|bos|>' }}
{%- if tools %}
    {{- '<|turn|>tools\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '<|end|>\n' }}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|turn|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content and loop.index0 > last.user %}
        {{- '<think>\n' + message.reasoning_content | trim + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
    {%- endfor %}
    {{- '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""

PARTS = """{%- for message in messages %}
    {{- '<|turn|>' + message.role + '\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- '(' + part.text + ')' }}{%- endfor %}
    {%- endif %}
    {{- '<|end|>\n' }}
{%- endfor %}"""

_TEXT = ("the mill turns the wheel and the miller mends the wheel of the mill ", "assistant user system tool\n\n")


def save_tokenizer(folder: Path, template: str | None = CHAT) -> Path:
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(CONTROLS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|bos|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
