"""Decisions, changelog, engines and the gate keep their form and stay complete."""

import ast
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from coordinator import config
from coordinator.engines.mindie.engine import OPTIONS
from coordinator.engines.table import ENGINES
from coordinator.observability.metrics import Metrics

ROOT = Path(__file__).parents[2]
DECISIONS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()
PROTOCOLS = (ROOT / "docs/protocols.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_has_its_parts(path):
    text = path.read_text()
    number = int(path.name[:4])
    assert re.match(rf"# {number}\. \S", text)
    assert re.search(r"^Status: (Proposed|Accepted|Superseded by \d{4})$", text, re.MULTILINE)
    assert re.search(r"^Date: \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    consequences = text.partition("## Consequences")[2]
    assert "- \\+ " in consequences
    assert "- \N{MINUS SIGN} " in consequences
    assert len(text.splitlines()) <= 80


def test_decisions_are_numbered_without_gaps_and_listed():
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (ROOT / "docs/adr/README.md").read_text()
    for path in DECISIONS:
        title = path.read_text().splitlines()[0].partition(". ")[2]
        assert f"| [{path.name[:4]}]({path.name}) | {title} |" in index


def test_the_version_has_its_changes():
    assert re.search(rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", CHANGELOG, re.MULTILINE)
    assert re.findall(r"^## \[([^\]]+)\]", CHANGELOG, re.MULTILINE)[0] == "Unreleased"
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_its_page_and_rows(engine):
    link = f"engines/{engine}.md"
    assert f"`{engine}`" in (ROOT / "docs" / link).read_text().splitlines()[0]
    assert re.search(rf"^\| `{engine}` \|.+\({re.escape(f'docs/{link}')}\)", README, re.MULTILINE)
    assert re.search(
        rf"^\| `{engine}` \|.+\({re.escape(link)}\)", (ROOT / "docs/protocols.md").read_text(), re.MULTILINE
    )


def test_no_page_is_of_an_engine_that_is_not_there():
    assert {path.stem.partition("-")[0] for path in (ROOT / "docs/engines").glob("*.md")} <= set(ENGINES)


def test_names_without_an_engine_are_said_to_be_reserved():
    reserved = re.search(r"reserves the names? (.+?);", README, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", reserved[1])) if reserved else set()
    assert named == set(config.ENGINES) - set(ENGINES)


def test_each_key_of_a_mindie_instance_is_described():
    page = (ROOT / "docs/engines/mindie.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## What is sent")[0], re.MULTILINE)
    assert set(rows) == set(OPTIONS)


def test_yaml_examples_load():
    """Whole files in the pages, which begin with a section, are valid configurations."""
    sections = tuple(f"{name}:" for name in config.Settings.model_fields)
    found = 0
    for path in PAGES:
        for text in re.findall(r"^```yaml\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            if text.startswith(sections) and "cluster.yaml:2:" not in path.read_text().partition(text)[2][:200]:
                config.parse(text)
                found += 1
    assert found >= 4


def test_metrics_and_keys_named_in_the_pages_exist():
    metrics = {instrument.name for instrument in Metrics(["openai"]).instruments}
    keys = {key.path for key in config.all_keys()}
    sections = "|".join(config.Settings.model_fields)
    for path in PAGES:
        text = path.read_text()
        for name in re.findall(r"pd_coordinator_\w+", text):
            assert re.sub("_(bucket|sum|count)$", "", name) in metrics or name in metrics, f"{path.name}: {name}"
        for key in re.findall(rf"`((?:{sections})\.[a-z_.\[\]]+)`", text):
            assert key in keys or any(known.startswith(f"{key}.") for known in keys), f"{path.name}: {key}"


def test_files_named_in_the_pages_exist():
    for path in PAGES:
        if path.name == "CHANGELOG.md":
            continue
        for name in re.findall(
            r"`((?:coordinator|instances|tests|configs|docker|bench|docs)/[\w./-]*)`", path.read_text()
        ):
            if "NAME" not in name:
                assert (ROOT / name).exists(), f"{path.name}: {name}"


def test_modules_named_in_the_architecture_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    for name in re.findall(r"\b((?:[a-z]+/)+[a-z_]+\.py)\b", page):
        assert (ROOT / name).exists() or (ROOT / "coordinator" / name).exists(), name
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    packages = {name.strip().removeprefix("coordinator.") for layer in layers for name in layer.split("|")}
    table = page.partition("## Packages and layers")[2].partition("## Three shelves")[0]
    rows = re.findall(r"^\| \d+ \| (.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == packages


def test_the_limits_told_are_those_of_the_code():
    """Numbers in operations.md that stand in the code as constants."""
    page = (ROOT / "docs/operations.md").read_text()
    limits = ast.parse((ROOT / "coordinator/server/limits.py").read_text())
    values = {
        node.target.id: node.value.value
        for node in ast.walk(limits)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant)
    }
    for name, words in (("idle_s", "closed after {:g} s"), ("head_s", "within {:g} s"), ("body_s", "more than {:g} s")):
        assert words.format(values[name]) in re.sub(r"\s+", " ", page)


def test_the_gate_can_be_run():
    gate = ROOT / ".ci/run"
    assert os.access(gate, os.X_OK)
    assert subprocess.run(["bash", "-n", str(gate)], timeout=20, check=False).returncode == 0
    text = gate.read_text()
    assert "set -euo pipefail" in text
    assert "make check" in text
    assert "make test" in text


def test_the_quick_gate_leaves_out_only_what_needs_processes():
    """Clients, browsers, real engines and measurements take minutes or programs that not everybody has."""
    recipe = re.search(r"^check: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    quick = set(re.findall(r"\btests/(\w+)", recipe[1]))
    there = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert there - quick == {"e2e", "browser", "perf", "real"}
    assert quick <= there


def test_each_target_of_make_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "test", "check", "bench"} <= targets
    for path in PAGES:
        for target in re.findall(r"`make ([a-z]+)", path.read_text()):
            assert target in targets, f"{path.name}: make {target}"
