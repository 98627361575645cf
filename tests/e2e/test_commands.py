"""The other commands of `pd-coordinator`, as processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import call, call_json, until

from coordinator import relay

PROGRAM = Path(sys.executable).with_name("pd-coordinator")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    words = [sys.executable, "-m", "coordinator", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_the_installed_program_has_a_version():
    assert PROGRAM.exists()
    done = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, timeout=60, check=True)
    compiled = "" if relay.__file__.endswith(".py") else r" \(compiled\)"
    assert re.fullmatch(rf"pd-coordinator \d+\.\d+\.\d+\S*{compiled}\n", done.stdout)


def test_check_passes_the_shipped_files():
    for name in ("demo", "full", "mindie"):
        path = Path(__file__).parents[2] / "configs" / f"{name}.yaml"
        done = run("check", "--config", str(path))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[-1].startswith(f"{path}: ok, ")


def test_schema_describes_the_file():
    done = run("schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    assert {"server", "cluster", "scheduling", "limits", "timeouts", "retry", "health"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("arguments", [["serve"], ["check", "--config"], ["dance"], []])
def test_wrong_usage(arguments: list[str]):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: pd-coordinator")


# --- nobody reads what they say


@pytest.mark.parametrize("arguments", [["schema"], ["demo", "--port", "0", "--prefill", "1", "--decode", "1"]])
def test_a_command_whose_reader_has_left_ends_quietly(arguments: list[str]):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "coordinator", *arguments]
    try:
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


# --- instance


def test_instance_speaks_the_protocol_until_sigterm(start):
    instance = start.instance("hybrid")
    assert call_json(instance.port, "/v1/models")["data"][0]["id"] == "sim-model"
    answer = call_json(instance.port, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}})
    assert answer["details"]["generated_tokens"] == 3
    instance.signal(signal.SIGTERM)
    assert instance.wait() == 0


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        (["--role", "prefil"], 2, "prefil"),
        (["--role", "prefill", "--fault", "explode"], 2, "explode"),
        (["--role", "prefill", "--set", "nothing=1"], 2, "nothing"),
        (["--role", "prefill", "--answer-tokens", "9-1"], 2, "--answer-tokens"),
    ],
)
def test_instance_refuses_wrong_options(wrong: list[str], status: int, words: str):
    done = run("instance", "--port", "0", *wrong)
    assert (done.returncode, words in done.stderr) == (status, True)
    assert "Traceback" not in done.stderr


def test_instance_on_a_busy_port(start):
    first = start.instance("decode")
    done = run("instance", "--role", "decode", "--port", str(first.port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{first.port}" in done.stderr


# --- demo


def test_demo_once_streams_an_answer_and_ends():
    done = run("demo", "--once", "--port", "0", "--prefill", "1", "--decode", "1")
    assert (done.returncode, done.stderr) == (0, "")
    before, _, after = done.stdout.partition("> Why does it help")
    assert "1 prefill and 1 decode instances" in before
    shown = re.search(r"(\d+) tokens: the first one from prefill p0 after \d+ ms, the others from decode d0", after)
    assert shown
    assert int(shown.group(1)) > 5


@pytest.mark.slow
def test_demo_stays_up_and_its_curl_lines_work(start):
    demo = start.command("demo", "--port", "0")
    demo.said(r"Ctrl-C ends it\.")
    lines = re.findall(r"^  (curl .*)$", demo.log(), re.MULTILINE)
    assert len(lines) >= 6
    the_live_page_has_the_request(demo.log())
    if shutil.which("curl"):
        for line in lines:
            done = subprocess.run(["sh", "-c", f"{line} -sS --fail --noproxy '*'"], capture_output=True, timeout=60,
                                  check=False)  # fmt: skip
            assert done.returncode == 0, (line, done.stderr)
            assert done.stdout
    demo.signal(signal.SIGINT)
    assert demo.wait() == 0


def the_live_page_has_the_request(printed: str) -> None:
    """At the address that is printed; also where the same is shown in the terminal."""
    (page,) = re.findall(r"live in a browser: (http://\S+)/$", printed, re.MULTILINE)
    (url,) = re.findall(r"^  pd-coordinator top --url (\S+)$", printed, re.MULTILINE)
    assert url == page
    assert f"to see it move on {page}/\n  for i in" in printed
    status, headers, body = call(int(page.rpartition(":")[2]), "/")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert b"v1/live" in body
    shown = json.loads(run("top", "--url", url, "--once", "--json").stdout)
    (path,) = shown["paths"]
    route = re.search(r"first one from prefill (\S+) after \d+ ms, the others from decode (\S+),", printed)
    assert route
    assert (path["prefill"], path["decode"], path["outcome"]) == (*route.groups(), "ok")


@pytest.mark.slow
def test_demo_survives_what_it_invites_to(start):
    """It prints process ids with the words "kill it and watch the others take over"."""
    demo = start.command("demo", "--port", "0", "--prefill", "2", "--decode", "1")
    demo.said(r"Ctrl-C ends it\.")
    rows = re.findall(r"(http://\S+)  \(process (\d+): kill it", demo.log())
    instances = [int(url.rpartition(":")[2]) for url, _ in rows]
    assert len(instances) == 3
    os.kill(int(rows[0][1]), signal.SIGKILL)
    until(lambda: refused(instances[0]), "the killed one is gone")
    port = int(re.search(r"serves on http://127\.0\.0\.1:(\d+)", demo.log()).group(1))
    for _ in range(4):
        assert call_json(port, "/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 3}})
    demo.signal(signal.SIGTERM)
    assert demo.wait() == 0
    assert all(refused(instance) for instance in instances)


def refused(port: int) -> bool:
    """Whether nobody listens there."""
    try:
        call(port, "/health")
    except ConnectionError:
        return True
    return False


def test_demo_on_a_busy_port_says_so(start):
    other = start.instance("hybrid")
    done = run("demo", "--once", "--port", str(other.port), "--prefill", "1", "--decode", "1")
    assert done.returncode == 1
    assert f"port {other.port} cannot be had" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_wants_both_roles():
    done = run("demo", "--once", "--port", "0", "--decode", "0")
    assert (done.returncode, done.stderr) == (1, "demo: --prefill and --decode must be 1 or more\n")
