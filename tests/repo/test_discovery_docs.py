"""docs/discovery.md, and the parts of configs/full.yaml that are commented out, say what the code does."""

import asyncio
import logging
import re
from pathlib import Path

import pytest
import yaml

from coordinator.cluster import Cluster, HealthSettings
from coordinator.config import KubernetesSource, all_keys, parse, read_instances
from coordinator.discovery import Discovery, Plan
from coordinator.discovery.kubernetes.facts import keys_of
from coordinator.discovery.kubernetes.objects import Meta
from coordinator.parts import load_settings, validate_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/discovery.md").read_text()
FULL = (ROOT / "configs/full.yaml").read_text()
SOURCES = {"dns": "name", "kubernetes": "kind"}


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commented(section: str) -> list[str]:
    """The lines of one source in full.yaml, without their comment signs."""
    found = re.search(rf"^  {section}: \[\].*\n((?:  #.*\n)+)", FULL, re.MULTILINE)
    assert found, section
    return [line.replace("# ", "  ", 1) for line in found[1].splitlines()]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_examples_load(text, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert load_settings(path).discovery


def test_the_example_of_a_file_with_instances_is_read(tmp_path):
    (text,) = blocks("yaml file")
    path = tmp_path / "instances.yaml"
    path.write_text(text)
    found = read_instances(str(path), parse("cluster:\n  engine: vllm\n"), validate_options)
    assert [one.id for one in found] == ["prefill-10.0.0.11:8000", "d0"]


def test_the_labels_of_the_example_are_those_that_count():
    (text,) = blocks("yaml pod")
    given = yaml.safe_load(text)["metadata"]
    meta = Meta(name="p0", labels=given["labels"], annotations=given["annotations"])
    keys = keys_of(meta, "10.0.0.1", {"http": 8000}.get, KubernetesSource(port="http"))
    assert keys == {"role": "prefill", "url": "http://10.0.0.1:8000", "model": "Qwen/Qwen3-8B"}


def test_every_label_has_its_row():
    rows = set(re.findall(r"^\| `(pd-coordinator\.io/\w+)` \|", PAGE, re.MULTILINE))
    defaults = {key.default for key in all_keys() if re.fullmatch(r"discovery\.kubernetes\[\]\.\w+_label", key.path)}
    assert rows == defaults


class Quiet:
    """A source that says nothing."""

    async def run(self, report):
        await asyncio.Event().wait()


async def test_what_is_shown_of_a_source_has_its_rows():
    cluster = Cluster({}, HealthSettings(), in_flight=lambda _: 0, log=logging.getLogger("quiet"))
    discovery = Discovery(cluster)
    discovery.apply({"files:x": Plan(1, Quiet)})
    (row,) = discovery.describe()
    await discovery.aclose()
    table = PAGE.partition("What the sources are up to")[2].partition("## Files")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(row)
    (shown,) = blocks("json")
    assert all(f'"{name}":' in shown for name in row)


@pytest.mark.parametrize("section", SOURCES)
def test_full_has_every_key_of_a_source_with_its_default(section):
    keys = {key.name: key for key in all_keys() if key.path.startswith(f"discovery.{section}[].")}
    lines = commented(section)
    (given,) = yaml.safe_load("\n".join(lines))
    assert given.keys() == keys.keys()
    for name, key in keys.items():
        if not key.required and name != "port":
            assert given[name] == (list(key.default) if isinstance(key.default, tuple) else key.default), name
    for line in lines:
        name, comment = re.fullmatch(r"[ -]*([a-z_]+):.*? # (.*)", line).groups()
        assert comment == keys[name].description, line


@pytest.mark.parametrize("section", SOURCES)
def test_full_is_right_with_a_source(section):
    assert getattr(parse("discovery:\n  " + section + ":\n" + "\n".join(commented(section))).discovery, section)
