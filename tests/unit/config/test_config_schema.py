"""The JSON Schema of the file."""

import re
from pathlib import Path

import pytest
import yaml

from coordinator.config import all_keys, schema

SCHEMA = schema()
TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
KEYWORDS = {
    "$schema": str,
    "$ref": str,
    "$defs": dict,
    "title": str,
    "description": str,
    "default": object,
    "type": (str, list),
    "enum": list,
    "anyOf": list,
    "oneOf": list,
    "items": dict,
    "properties": dict,
    "required": list,
    "additionalProperties": (bool, dict),
    "minimum": (int, float),
    "maximum": (int, float),
    "exclusiveMinimum": (int, float),
    "minLength": int,
    "maxLength": int,
    "pattern": str,
}


def target(reference: str) -> dict:
    assert reference.startswith("#/$defs/")
    return SCHEMA["$defs"][reference.removeprefix("#/$defs/")]


def nodes(node: dict):
    yield node
    for name in ("properties", "$defs"):
        for inner in node.get(name, {}).values():
            yield from nodes(inner)
    for name in ("anyOf", "oneOf"):
        for inner in node.get(name, []):
            yield from nodes(inner)
    if "items" in node:
        yield from nodes(node["items"])


def accepts(node: dict, value: object) -> bool:
    """Whether a value fits, for the keywords that occur."""
    if "$ref" in node and not accepts(target(node["$ref"]), value):
        return False
    for name in ("anyOf", "oneOf"):
        fitting = sum(accepts(option, value) for option in node.get(name, []))
        if name in node and (fitting == 0 or (name == "oneOf" and fitting > 1)):
            return False
    kinds = node.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(has_type(value, kind) for kind in kinds):
        return False
    if "enum" in node and value not in node["enum"]:
        return False
    if isinstance(value, dict):
        return accepts_mapping(node, value)
    if isinstance(value, list):
        return all(accepts(node.get("items", {}), item) for item in value)
    if has_type(value, "number"):
        low, high = node.get("minimum", value), node.get("maximum", value)
        return low <= value <= high and node.get("exclusiveMinimum", value - 1) < value
    if isinstance(value, str):
        return len(value) >= node.get("minLength", 0) and bool(re.search(node.get("pattern", ""), value))
    return True


def has_type(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def accepts_mapping(node: dict, value: dict) -> bool:
    known = node.get("properties", {})
    if not set(node.get("required", [])) <= set(value):
        return False
    if node.get("additionalProperties") is False and not set(value) <= set(known):
        return False
    others = node.get("additionalProperties", True)
    others = others if isinstance(others, dict) else {}
    return all(accepts(known.get(name, others), item) for name, item in value.items())


def test_it_uses_known_keywords_with_values_of_the_right_kind():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert SCHEMA["title"] == "cluster.yaml"
    for node in nodes(SCHEMA):
        assert set(node) <= set(KEYWORDS)
        assert all(isinstance(value, KEYWORDS[name]) for name, value in node.items())
        kinds = node.get("type", [])
        assert set([kinds] if isinstance(kinds, str) else kinds) <= set(TYPES)
        assert "$ref" not in node or target(node["$ref"])
        assert all(name in node["properties"] for name in node.get("required", []))


def test_every_key_has_a_description_of_one_line():
    for key in all_keys():
        assert key.description, key.path
        assert len(key.description) <= 80
        assert "\n" not in key.description


def test_it_accepts_the_full_file():
    full = yaml.safe_load((Path(__file__).parents[3] / "configs/full.yaml").read_text())
    assert accepts(SCHEMA, full)
    assert accepts(SCHEMA, {"scheduling": {"policy": {"prefill": "a", "decode": "b"}}})
    assert accepts(SCHEMA, {"cluster": {"instances": [{"role": "decode", "url": "http://a", "group": 1, "own": []}]}})


@pytest.mark.parametrize(
    "value",
    [
        {"servr": {}},
        {"server": {"prot": 1}},
        {"server": {"port": "1"}},
        {"server": {"port": 70000}},
        {"server": {"route_headers": 1}},
        {"cluster": {"engine": "nope"}},
        {"cluster": {"instances": [{"role": "decode"}]}},
        {"cluster": {"instances": [{"role": "decoder", "url": "http://a"}]}},
        {"scheduling": {"policy": {"prefill": "a"}}},
        {"scheduling": {"load_balance": {"bytes_to_tokens": 0}}},
    ],
)
def test_it_refuses_what_loading_refuses(value):
    assert not accepts(SCHEMA, value)
