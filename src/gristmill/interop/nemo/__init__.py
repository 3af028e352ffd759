"""Our selection policies for NeMo RL: named in its configuration, they select among its own records.

`gristmill.interop.nemo:returned_history`, `:all_captured` and `:final_context` have its signature. README.md says what
of its records they read.
"""

from gristmill.interop.nemo.policies import OPTIONS_VARIABLE, all_captured, final_context, returned_history

__all__ = ["OPTIONS_VARIABLE", "all_captured", "final_context", "returned_history"]
