"""docs/configuration.md and configs/ say what the models say."""

import json
import re
from pathlib import Path

import pytest
import yaml

from coordinator.config import ConfigError, Key, Settings, all_keys, load, notes, parse, schema

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/configuration.md").read_text()
FULL = ROOT / "configs/full.yaml"
SCHEMA = schema()
SECTIONS = f"(?:{'|'.join(Settings.model_fields)})"
NAMES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "array": "list",
    "object": "mapping",
    "null": "null",
}


def rows() -> dict[str, str]:
    """Key path to the table row that the page must have, for every key that holds a value."""
    return {key.path: row(key) for key in all_keys() if not key.section}


def row(key: Key) -> str:
    default = key.default if isinstance(key.default, str) else json.dumps(key.default)
    meaning = key.description.replace("<", "\\<").replace("|", "\\|")
    return f"| `{key.path}` | {'required' if key.required else f'`{default}`'} | {allowed(key.path)} | {meaning} |"


def allowed(path: str) -> str:
    node = SCHEMA
    for step in path.split("."):
        node = with_properties(node)[step.removesuffix("[]")]
        node = node["items"] if step.endswith("[]") else node
    return words(resolved(node))


def resolved(node: dict) -> dict:
    reference = node.get("$ref")
    return SCHEMA["$defs"][reference.removeprefix("#/$defs/")] if reference else node


def with_properties(node: dict) -> dict:
    node = resolved(node)
    options = [resolved(option) for option in (node, *node.get("anyOf", ()), *node.get("oneOf", ()))]
    return next(option["properties"] for option in options if "properties" in option)


def words(node: dict) -> str:
    options = node.get("anyOf", node.get("oneOf"))
    if options:
        return " or ".join(words(resolved(option)) for option in options)
    if "enum" in node:
        return ", ".join(node["enum"])
    if isinstance(node["type"], list):
        return " or ".join(NAMES[kind] for kind in node["type"])
    return NAMES[node["type"]] + interval(node)


def interval(node: dict) -> str:
    if "exclusiveMinimum" in node:
        return f" > {node['exclusiveMinimum']}, ≤ {node['maximum']}"
    return f" {node['minimum']}..{node['maximum']}" if "minimum" in node else ""


def test_every_key_has_its_row():
    missing = [line for line in rows().values() if line not in PAGE.splitlines()]
    assert not missing, "docs/configuration.md lacks these rows:\n" + "\n".join(missing)


def test_every_documented_key_exists():
    documented = re.findall(rf"^\| `({SECTIONS}(?:\.[a-z_.\[\]]+)?)` \|", PAGE, re.MULTILINE)
    assert set(documented) == set(rows())
    assert len(documented) == len(set(documented))


def test_keys_named_in_the_text_exist():
    ours = {key.path for key in all_keys()}
    named = set(re.findall(rf"`({SECTIONS}\.[a-z_.\[\]]+)`", PAGE))
    assert len(named) > len(rows()) / 2
    assert named <= ours


def test_the_example_of_a_faulty_file_gives_what_the_page_shows():
    faulty, lines = re.search(r"This file\n\n```yaml\n(.*?)```\n\ngives\n\n```text\n(.*?)```", PAGE, re.DOTALL).groups()
    with pytest.raises(ConfigError) as caught:
        parse(faulty)
    assert str(caught.value) == lines.strip()


def test_the_smallest_example_loads_without_a_note():
    example = re.search(r"needs no more than this:\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
    assert notes(parse(example)) == ()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_file_in_configs_loads_without_a_note(path):
    assert notes(load(path)) == ()


def test_full_has_every_key_with_its_default_and_nothing_else():
    given = yaml.safe_load(FULL.read_text())
    entries = given["cluster"].pop("instances")
    expected = Settings().model_dump(mode="json")
    del expected["cluster"]["instances"]
    assert given == expected
    defaults = {key.name: key.default for key in all_keys() if key.path.startswith("cluster.instances[].")}
    for entry in entries:
        assert entry.keys() == defaults.keys()
        assert all(entry[name] is None for name in entry if name not in ("role", "url"))
    assert [entry["role"] for entry in entries] == ["prefill", "decode"]


def test_full_says_at_every_key_what_the_models_say():
    by_name = {}
    for key in all_keys():
        by_name.setdefault(key.name, set()).add(key.description)
    lines = [line for line in FULL.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in lines:
        name, comment = re.fullmatch(r"[ -]*([a-z_]+):.*? # (.*)", line).groups()
        assert comment in by_name[name], line
