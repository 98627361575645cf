"""README.md and the pages say every command and flag, and none that does not exist."""

import argparse
import re
from pathlib import Path

import pytest

from coordinator import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = README + "".join((ROOT / f"docs/{name}.md").read_text() for name in ("operations", "simulators"))


def commands() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    return next(dict(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


COMMANDS = commands()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_stands_in_readme(command):
    assert f"`pd-coordinator {command}" in README


@pytest.mark.parametrize(
    ("command", "flag"), [(name, flag) for name, p in COMMANDS.items() for flag in sorted(flags(p))]
)
def test_each_flag_is_described(command, flag):
    assert re.search(rf"`[^`\n]*{re.escape(flag)}(?![\w-])[^`\n]*`", PAGES), f"{command} {flag}"


def test_flags_of_the_program_are_described():
    for flag in flags(cli._parser()):
        assert flag in README


def test_examples_use_commands_and_flags_that_exist():
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line in re.findall(r"pd-coordinator ([a-z]+)((?: (?:[^\s`|&#]+))*)", path.read_text()):
            command, rest = line
            if command not in COMMANDS:
                assert not rest.lstrip().startswith("--"), f"{path.name}: no command {command}"
                continue
            used = set(re.findall(r"(?<!\S)--[a-z-]+", rest))
            assert used <= flags(COMMANDS[command]), f"{path.name}: {command} {used - flags(COMMANDS[command])}"
