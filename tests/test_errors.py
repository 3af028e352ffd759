"""The error tree and the closed set of codes."""

from __future__ import annotations

import inspect
import re
import traceback

import pytest

import gristmill
from gristmill import errors
from gristmill.errors import CODE_MEANINGS, Code, ConfigError, GristmillError, Refusal, SelectionError


def test_every_code_has_a_meaning() -> None:
    # A code that the reference page does not explain helps nobody.
    assert set(CODE_MEANINGS) == set(Code)
    assert all(meaning.endswith(".") and len(meaning) > 15 for meaning in CODE_MEANINGS.values())


def test_codes_are_lower_case_names() -> None:
    # Codes are facets, JSON values and file names.
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in Code)
    assert all(code.name.lower() == code.value for code in Code)


def test_at_most_seven_children() -> None:
    # More kinds of error than anybody can remember to catch.
    children = GristmillError.__subclasses__()
    assert len([child for child in children if child.__module__ == "gristmill.errors"]) <= 7
    assert all(child.default_code in CODE_MEANINGS for child in children)


def test_all_names_what_is_public() -> None:
    # A class left out of __all__ is not documented; a name in it that is not there breaks `import *`.
    public = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == "gristmill.errors" and not name.startswith("_")
    }
    assert set(errors.__all__) == public | {"CODE_MEANINGS"}
    assert list(errors.__all__) == sorted(errors.__all__)


def test_a_refusal_is_a_value_error_with_its_place() -> None:
    # A policy written for NeMo catches ValueError.
    refusal = SelectionError(Code.MATCH_MISSING, "expected a, got b", where="$.x", evidence={"item_index": 1})
    assert isinstance(refusal, ValueError)
    assert str(refusal) == "match_missing: expected a, got b (at $.x)"
    assert refusal.evidence == {"item_index": 1}
    assert Refusal(Code.MATCH_MISSING, "m").where == "$"


def test_an_error_has_a_code_of_its_kind() -> None:
    # `--json` prints a code for every error, also where the raiser named none.
    assert ConfigError("m").code is Code.OPTION_INVALID
    assert ConfigError("m", code=Code.POLICY_OPTION_INVALID, hint="h").hint == "h"


def test_a_traceback_tells_the_hint() -> None:
    # In a notebook nobody looks into the attributes of an exception to learn what to install.
    told = "".join(traceback.format_exception(ConfigError("m", hint="pip install it")))
    assert told.endswith("m\nhint: pip install it\n")
    assert not hasattr(ConfigError("m"), "__notes__")


def test_public_names() -> None:
    # The names that NeMo's users know are importable from the top, and nothing else is by accident.
    for name in gristmill.__all__:
        assert getattr(gristmill, name) is not None
    with pytest.raises(AttributeError, match="teleport"):
        _ = gristmill.teleport
