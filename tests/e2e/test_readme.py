"""What README.md shows is what one sees: its examples run against a demo cluster."""

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from readme_blocks import Example, examples, shape

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
EXAMPLES = examples(PAGE)
START_S = 90.0
EXAMPLE_S = 90.0

pytestmark = pytest.mark.xdist_group("readme")


def read_until(process: subprocess.Popen, mark: str, within_s: float) -> str:
    """What the process prints up to `mark`."""
    assert process.stdout is not None
    deadline_s, text = time.monotonic() + within_s, ""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while mark not in text:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"no {mark!r} within {within_s:g} s: {text}"
            if selector.select(left_s):
                read = os.read(process.stdout.fileno(), 65536)
                assert read, f"the demo ended: {text}"
                text += read.decode("utf-8", "replace")
    return text


@pytest.fixture(scope="module")
def demo():
    """A demo cluster: what it printed, and its data and management addresses."""
    command = [sys.executable, "-m", "coordinator", "demo", "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        try:
            text = read_until(run, "Ctrl-C ends it.", START_S)
            data = re.search(r"serves on http://(\S+)\.\n", text)[1]
            management = re.search(r"http://(\S+)/v1/instances", text)[1]
            yield text, data, management
        finally:
            run.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(45)
            run.kill()
    assert run.returncode == 0


def run_example(example: Example, data: str, management: str) -> str:
    code = example.code.replace("127.0.0.1:1025", data).replace("127.0.0.1:1026", management)
    if example.kind == "sh":
        # one command per line, each printing one answer: their ends are not always line ends
        code = "\n".join(f"{line}; echo" for line in code.splitlines())
        command = ["bash", "-euc", code]
    else:
        command = [sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=EXAMPLE_S, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_has_examples_of_each_api_family_and_client():
    text = "\n".join(example.code for example in EXAMPLES)
    for part in ("/v1/chat/completions", "/generate_stream", "/generate ", "/v2/models/", "/infer", "/metrics"):
        assert part in text
    assert sum(example.kind == "python" for example in EXAMPLES) == 3


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.kind == "sh"], ids=lambda e: e.code[:60].strip())
def test_a_command_prints_what_is_shown(example, demo):
    _, data, management = demo
    assert example.printed is not None
    assert shape(run_example(example, data, management)) == shape(example.printed)


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.kind == "python"], ids=lambda e: e.code.split()[1])
def test_a_client_gets_an_answer(example, demo):
    _, data, management = demo
    assert run_example(example, data, management).strip()


def test_the_demo_prints_what_is_shown(demo):
    """Line by line, without regard to numbers; the simulated words are the same each time."""
    text, *_ = demo
    shown = re.search(r"It prints:\n\n```text\n(.*?)```", PAGE, re.DOTALL)[1]

    def skeleton(lines: str) -> list[str]:
        return [re.sub(r"\d+", "N", line).rstrip() for line in lines.splitlines() if line.strip()]

    ours = skeleton(text)
    for line in skeleton(shown):
        if " tokens: " in line:
            route = r"N tokens: the first one from prefill pN after N ms, the others from decode dN, N ms apart\."
            assert re.fullmatch(route, line)
            assert any(re.fullmatch(route, other) for other in ours)
        else:
            assert line in ours, line


def test_the_shape_of_an_answer_tells_different_ones_apart():
    assert shape('{"a":1}') == shape('{"a":2.5}')
    assert shape('{"a":1}') != shape('{"a":"1"}')
    assert shape('{"a":1}') != shape('{"b":1}')
    assert shape('data: {"a":null}\n\ndata: [DONE]\n') != shape('data: {"a":null}\n')
    assert shape('up{x="1"} 1.0') == shape('up{x="1"} 0')
    assert shape('up{x="1"} 1.0') != shape('up{x="2"} 1.0')
