"""The tokens of captured calls: checked, stored as deltas to a verified base, and expanded again.

`check` decides whether tokens may be trained, `book` stores them, `expand` gives them back; `digests` and
`prefix_tree` are what all of them, and reconstruction, stand on.
"""

from gristmill.tokens.book import StoredTokens, TokenBook
from gristmill.tokens.check import CheckedTokens, UnusableTokens, check_tokens
from gristmill.tokens.digests import chain_digest, logprobs_digest, running_digest, sequence_digest
from gristmill.tokens.expand import base_chain, checked_delta, expand
from gristmill.tokens.prefix_tree import Lane, Place, PrefixTree, common_prefix

__all__ = [
    "CheckedTokens",
    "Lane",
    "Place",
    "PrefixTree",
    "StoredTokens",
    "TokenBook",
    "UnusableTokens",
    "base_chain",
    "chain_digest",
    "check_tokens",
    "checked_delta",
    "common_prefix",
    "expand",
    "logprobs_digest",
    "running_digest",
    "sequence_digest",
]
