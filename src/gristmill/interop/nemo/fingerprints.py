"""The function that made the fingerprints of somebody's items, by name; NeMo Gym's own by default.

Invariant: fingerprints are compared with what the function that made them says of a returned item, never with our
own; what that function refuses is refused with a code.

Not here: our fingerprints (gristmill.fingerprint).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, cast

from gristmill.canonical import JsonValue
from gristmill.errors import Code, PolicyError, Refusal, SelectionError

__all__ = ["NEMO_FINGERPRINT", "Fingerprint", "fingerprint_named"]

NEMO_FINGERPRINT: Final = "nemo_gym.token_id_capture.completion:output_item_fingerprint"
"""The function of NeMo Gym that makes the fingerprints of `CallRecord.output_items`."""

Fingerprint = Callable[[JsonValue], str]


def fingerprint_named(named: str | Fingerprint) -> Fingerprint:
    """Return a function of fingerprints whose refusals have a code.

    Args:
        named: the function, or `package.module:function`.

    Raises:
        PolicyError: `policy_load_failed`, `policy_not_callable`.
    """
    made: Any = _loaded(named) if isinstance(named, str) else named
    if not callable(made):
        raise PolicyError(
            f"expected a function from an item to its fingerprint, got {type(made).__name__}",
            code=Code.POLICY_NOT_CALLABLE,
            where=str(named),
        )

    def checked(item: JsonValue) -> str:
        try:
            return cast(Fingerprint, made)(item)
        except Refusal:
            raise
        except (ValueError, TypeError) as error:
            raise SelectionError(
                Code.OUTPUT_MALFORMED, f"expected an item that {_name(named)} can read: {error}"
            ) from error

    return checked


def _name(named: str | Fingerprint) -> str:
    return named if isinstance(named, str) else getattr(named, "__qualname__", repr(named))


def _loaded(named: str) -> Any:
    module, _, attribute = named.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(
            f"expected to load the function of fingerprints {named}, got {type(error).__name__}: {error}",
            code=Code.POLICY_LOAD_FAILED,
            where=named,
            hint="name the function that made the records' fingerprints: fingerprint=package.module:function",
        ) from error
