"""Save a tiny Qwen3 of random weights beside a real tokenizer: every token is as likely as every other, nearly.

Run by vllm.sh with the interpreter of vLLM's environment: `make_model.py TOKENIZER_FOLDER MODEL_FOLDER`.

Random tokens are the hardest case for everything that compares texts. So that replies end and thinking ends, one
dimension of every hidden state is the same, and the output weights of two control tokens lean on it.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TURN = 151645
END_OF_THINKING = 151668
PUNCTUATION = (1, 330, 788, 4913, 5212, 90, 92, 9207, 25)
"""Ids of `"`, ` "`, `":`, `{"`, ` {"`, `{`, `}`, `"}` and `:`, without which a string inside a grammar never ends."""
LOGITS = {END_OF_TURN: 8.3, END_OF_THINKING: 9.2, **dict.fromkeys(PUNCTUATION, 8.0)}
"""1 % to 4 % of the samples each, where the others have a logit near 0."""


def main(tokenizer: Path, folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151669,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        eos_token_id=END_OF_TURN,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0  # against 0.02 elsewhere: it stays the largest after all layers
        constant = float(torch.tensor(64.0).sqrt())  # what the last norm makes of it
        model.lm_head.weight[:, 0] = 0.0
        for token, logit in LOGITS.items():
            model.lm_head.weight[token, 0] = logit / constant
        model.lm_head.weight[:, 1:] *= 60.0  # the other dimensions are small after the norm; keep the choice varied
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


main(Path(sys.argv[1]), Path(sys.argv[2]))
