"""Save a tiny Qwen3 beside a real tokenizer: it thinks and writes at random, and calls a shell tool every so often.

Run by vllm.sh with the interpreter of vLLM's environment: `make_model.py TOKENIZER_FOLDER MODEL_FOLDER`.

Random tokens are the hardest case for everything that compares texts. Most tokens share one hidden state, from which
all of them are equally likely but for a few that lean on it: the ends of thinking, turns and strings. Some tokens have
a state of their own that says what comes next; through them the model opens its thinking, and calls `bash`, `Bash` or
`exec_command` with a tiny command, in a spelling of its own. The layers in between add noise.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

END_OF_TURN = 151645
TOOL_CALL, END_OF_TOOL_CALL = 151657, 151658
THINK, END_OF_THINKING = 151667, 151668
NEWLINE, BLANK_LINE = 198, 271
PUNCTUATION = (1, 330, 788, 4913, 5212, 90, 92, 9207, 25)
"""Ids of `"`, ` "`, `":`, `{"`, ` {"`, `{`, `}`, `"}` and `:`, without which a string inside a grammar never ends."""

LEANS = {**dict.fromkeys(PUNCTUATION, 8.0), END_OF_TURN: 7.7, END_OF_THINKING: 9.2, PUNCTUATION[0]: 9.4}
"""1 % to 5 % of the samples each, where the others have a logit near 0 and the logarithm of their number is 12.

The likeliest is a quotation mark, so that a greedy reply never ends.
"""

CERTAIN, EITHER, OFTEN = 20.0, 16.0, 13.5
NEXT = {
    NEWLINE: {THINK: EITHER},
    END_OF_THINKING: {BLANK_LINE: CERTAIN},
    BLANK_LINE: {TOOL_CALL: OFTEN},
    TOOL_CALL: {4913: CERTAIN},  # {"
    4913: {606: CERTAIN},  # name
    606: {788: CERTAIN},  # ":
    788: {330: CERTAIN},  # ' "'
    330: {46216: EITHER, 33: EITHER, 11748: EITHER},  # bash, B, exec
    33: {988: CERTAIN},  # ash
    11748: {10811: CERTAIN},  # _command
    46216: {2198: CERTAIN},  # ","
    988: {2198: CERTAIN},
    10811: {2198: CERTAIN},
    2198: {16370: CERTAIN},  # arguments
    16370: {22317: CERTAIN},  # ":{"
    22317: {5631: EITHER, 8710: EITHER},  # command, cmd
    5631: {3252: CERTAIN},  # ":"
    8710: {3252: CERTAIN},
    3252: {4730: EITHER, 25565: EITHER},  # ls, pwd
    4730: {30975: CERTAIN},  # "}}
    25565: {30975: CERTAIN},
    30975: {END_OF_TOOL_CALL: CERTAIN},
    END_OF_TOOL_CALL: {END_OF_TURN: CERTAIN},
}


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
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    states = len(NEXT) + 1
    constant = 64**0.5  # what the last norm makes of a state's own dimension, beside which the others are small
    with torch.no_grad():
        embedding[:, :states] = 0.0
        embedding[:, 0] = 2.0
        head[:, :states] = 0.0
        head[:, states:] *= 60.0
        for token, logit in LEANS.items():
            head[token] = 0.0
            head[token, 0] = logit / constant
        for state, (token, following) in enumerate(NEXT.items(), start=1):
            embedding[token, 0] = 0.0
            embedding[token, state] = 2.0
            for after, logit in following.items():
                head[after, state] = logit / constant
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)


main(Path(sys.argv[1]), Path(sys.argv[2]))
