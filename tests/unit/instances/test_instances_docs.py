"""docs/simulators.md names everything there is, and its examples work."""

import argparse
import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from mindie_client import call

from instances.cli import add_arguments, read_options
from instances.disaggpb import settings as disaggpb
from instances.faults import COMMON_MENU
from instances.microserving import settings as microserving
from instances.mindie import settings as mindie
from instances.options import Options
from instances.run import Fleet
from instances.sglang import settings as sglang
from instances.vllm import settings as vllm
from instances.xllm import settings as xllm

ENGINES = {"mindie": mindie, "vllm": vllm, "sglang": sglang, "microserving": microserving, "xllm": xllm,
           "disaggpb": disaggpb}  # fmt: skip
PAGE = (Path(__file__).parents[3] / "docs" / "simulators.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def parser():
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made


def named(word):
    return f"`{word}`" in PAGE or f"`{word} " in PAGE


def test_every_option_setting_and_fault_is_named():
    options = [flag for action in parser()._actions for flag in action.option_strings if flag not in ("-h", "--help")]
    settings = [field.name for module in ENGINES.values() for field in dataclasses.fields(module.Settings)]
    faults = [name for module in ENGINES.values() for name in module.MENU]
    assert [word for word in (*options, *settings, *COMMON_MENU, *faults) if not named(word)] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_every_setting_stands_under_its_engine_with_its_default(engine):
    _, _, rest = PAGE.partition(f"Settings of `{engine}`:")
    table = rest.split("\n\n")[1]
    rows = dict(re.findall(r"\| `(\w+)` \|([^|]*)\|", table))
    settings = ENGINES[engine].Settings()
    shown = {f.name: f"{value:g}" if isinstance(value := getattr(settings, f.name), float) else str(value)
             for f in dataclasses.fields(settings)}  # fmt: skip
    assert {name: default.strip() for name, default in rows.items()} == shown


@pytest.mark.parametrize("engine", ENGINES)
async def test_every_route_is_named(engine):
    async with Fleet([Options(engine=engine)]) as fleet:
        engine = fleet.hybrid[0].engine
        for route in engine.routes():
            path = re.sub(r"\{model[^}]*\}", "{m}", route.path)
            path = re.sub(r"\{role[^}]*\}", "{role}", path).replace(r"{seconds:\d+}", "N")
            for one in ("generate", "generate_stream", "infer") if "{call" in path else ("",):
                assert named(re.sub(r"\{call[^}]*\}", one, path)), path


def test_the_command_lines_can_be_parsed():
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("pd-coordinator")]
    assert len(commands) >= 3
    for command in commands:
        program, name, *args = shlex.split(command)
        assert (program, name) == ("pd-coordinator", "instance")
        assert read_options(parser().parse_args(args)).role in command


async def test_the_calls_work():
    lines = [shlex.split(line) for block in blocks("sh") for line in block.splitlines() if line.startswith("curl")]
    assert len(lines) >= 5
    async with Fleet([Options(role="decode"), Options()]) as fleet:
        decode, hybrid = fleet.instances
        link = call(decode, "GET", "/sim/state")
        assert (await link).status == 200
        for words in lines:
            url = next(word for word in words if word.startswith("http"))
            port, _, path = url.removeprefix("http://127.0.0.1:").partition("/")
            body = words[words.index("-d") + 1].encode() if "-d" in words else None
            instance = hybrid if port == "7003" else decode
            answer = await call(instance, "GET" if body is None else "POST", f"/{path}", body)
            if json.loads(body or b"{}").get("do") == "silence":
                assert b"no /dresult stream" in answer.body  # understood; there is just nothing to silence here
            else:
                assert answer.status == 200


@pytest.mark.parametrize(("number", "shows"), [(0, "lastData"), (1, "read by decode"), (2, "end of generation")])
def test_the_programs_run(number, shows, capsys):
    code, count = blocks("python")[number], len(blocks("python"))
    assert count == 3
    exec(compile(code, "docs/simulators.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.count(shows) == 1
