"""Whatever happens to a file: settings or a ConfigError of single lines, nothing else."""

from collections.abc import Callable
from pathlib import Path

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.config import ConfigError, Settings, load, notes, parse, to_instances

FULL = (Path(__file__).parents[3] / "configs/full.yaml").read_text()
LINES = FULL.splitlines(keepends=True)
SNIPPETS = [
    "*a",
    "&a ",
    "!!int ",
    "<<: ",
    "? ",
    "- ",
    "{",
    "]",
    "'",
    '"',
    "|\n",
    "\t",
    "---\n",
    "%",
    "0x",
    "\x85",
    ": ",
    "\n  ",
]

snippet = st.sampled_from(SNIPPETS) | st.text(max_size=6)
edits = st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 30), snippet), min_size=1, max_size=4)
scalar = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["a:b", "http://a"])
)
value = st.recursive(
    scalar, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def outcome(call: Callable[[], Settings]) -> Settings | ConfigError:
    try:
        return call()
    except ConfigError as error:
        return error


def check(text: str) -> None:
    found = outcome(lambda: parse(text))
    if isinstance(found, ConfigError):
        assert found.problems
        assert len(str(found).split("\n")) == len(found.problems)
        last = max(1, len(text.splitlines()))
        assert all(problem.line is None or 1 <= problem.line <= last for problem in found.problems)
    else:
        notes(found)
        to_instances(found, lambda engine, options: options)


@given(edits)
@settings(max_examples=200, deadline=None)
def test_edited_text(edits):
    text = FULL
    for position, length, new in edits:
        text = text[:position] + new + text[position + length :]
    check(text)


@given(st.permutations(range(len(LINES))), st.integers(0, len(LINES)))
@settings(max_examples=50, deadline=None)
def test_shuffled_lines(order, size):
    check("".join(LINES[position] for position in order[:size]))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_exchanged_values(data):
    root = yaml.safe_load(FULL)
    holder, key = root, data.draw(st.sampled_from(list(root)))
    while isinstance(holder[key], (dict, list)) and holder[key] and data.draw(st.booleans()):
        holder = holder[key]
        key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(value)
    if isinstance(holder, dict) and data.draw(st.booleans()):
        holder[data.draw(st.text(max_size=10))] = data.draw(value)
    check(yaml.safe_dump(root, allow_unicode=True))


@given(st.binary(max_size=60))
@example(b"\xef\xbb\xbf{}")
@settings(max_examples=100, deadline=None)
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "c.yaml"
    path.write_bytes(data)
    found = outcome(lambda: load(path))
    assert isinstance(found, Settings) or str(found).count("\n") == len(found.problems) - 1
