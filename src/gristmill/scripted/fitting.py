"""Values of a script fitted to the JSON schema of a tool or of a structured answer.

Invariant: the same values and schema give the same object: what the script names comes first and in its order, then
what the schema requires and the script does not name.

Not here: checking anything against a schema; a harness does that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

__all__ = ["fitted"]

Schema = Mapping[str, Any]

_FILLER: Final = "text"
_DEEPEST: Final = 12


def fitted(values: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Fit values to an object schema.

    Args:
        values: by key; a key `a|b|c` takes the first of these names that the schema has, and is left out where it has
            none of them. A schema without properties takes everything, by first name.
        schema: JSON schema of an object.

    Returns:
        The object; required properties that are missing get a value of their type.
    """
    return _fitted(values, schema, schema, 0)


def _fitted(values: Mapping[str, Any], schema: Schema, root: Schema, depth: int) -> dict[str, Any]:
    schema = _resolved(schema, root)
    properties = cast("dict[str, Any]", schema.get("properties") or {})
    made: dict[str, Any] = {}
    for key, value in values.items():
        names = key.split("|")
        name = next((name for name in names if name in properties), None if properties else names[0])
        if name is not None:
            made[name] = _coerced(value, _resolved(properties.get(name) or {}, root), root)
    for name in cast("list[str]", schema.get("required") or []):
        if name not in made:
            made[name] = _filler(properties.get(name) or {}, root, depth + 1)
    return made


def _resolved(schema: Any, root: Schema) -> Schema:
    """Follow references inside the schema and take the first alternative that is not null."""
    for _ in range(_DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        found = cast("Mapping[str, Any]", schema)
        reference = found.get("$ref")
        alternatives = cast("list[Any]", found.get("anyOf") or found.get("oneOf") or found.get("allOf") or [])
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for part in reference[2:].split("/"):
                target = cast("Mapping[str, Any]", target).get(part) if isinstance(target, Mapping) else None
            schema = target
        elif alternatives and "type" not in found and "properties" not in found:
            real = (one for one in alternatives if one != {"type": "null"})
            schema = next(real, None)
        else:
            return found
    return {}


def _type(schema: Schema) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in cast("list[Any]", kind) if one != "null"), None)
    return kind if isinstance(kind, str) else None


def _coerced(value: Any, schema: Schema, root: Schema) -> Any:
    kind = _type(schema)
    if isinstance(value, dict) and schema.get("properties"):
        return _fitted(cast("dict[str, Any]", value), schema, root, 1)
    if not isinstance(value, str) or kind in (None, "string"):
        return cast(object, value)
    if kind == "array":
        items = _type(_resolved(schema.get("items") or {}, root))
        # A list of words is what old shell tools want of a command.
        return ["bash", "-lc", value] if items in (None, "string") else []
    try:
        read = json.loads(value)
    except ValueError:
        return value
    kinds: dict[str, tuple[type, ...]] = {
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "object": (dict,),
    }
    return cast(object, read) if isinstance(read, kinds.get(str(kind), ())) else value


def _filler(schema: Any, root: Schema, depth: int) -> Any:
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    kind = _type(schema) or ("object" if schema.get("properties") else "string")
    if depth > _DEEPEST:
        return None
    match kind:
        case "object":
            return _fitted({}, schema, root, depth)
        case "array":
            return [_filler(schema.get("items") or {}, root, depth + 1)] if schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
        case _:
            length = schema.get("maxLength")
            return _FILLER[:length] if isinstance(length, int) else _FILLER
