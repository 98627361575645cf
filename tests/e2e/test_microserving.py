"""MLC clusters of real processes: the demo, the tutorial's pattern beside its configuration, `serve` in a file."""

import http.client
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from clusters import QUICK_HEALTH
from processes import Process, call, until

from instances import tokens

pytestmark = pytest.mark.xdist_group("microserving")
PATTERNS = Path(__file__).parents[2] / "configs/patterns"
PAGE = Path(__file__).parents[2] / "docs/patterns.md"
PROMPT = "one two three four five"
IDS = list(tokens.encode(PROMPT))


def fleet(start, *roles):
    return list(start.fleet([{"role": role, "engine": "microserving", "model": "m"} for role in roles]).instances)


def rows(instances):
    made = []
    for instance in instances:
        number = sum(row["role"] == instance.role for row in made)
        ident = f"{instance.role[0]}{number}"
        rank = instance.state()["recv_rank"]
        made.append({"id": ident, "role": instance.role, "url": instance.url, "recv_rank": rank})
    return made


def front(start, instances, engine, **server):
    coordinator = start.coordinator(
        {
            "server": {"port": 0, "management_port": 0, **server},
            "cluster": {"engine": engine, "instances": rows(instances)},
            "health": QUICK_HEALTH,
        }
    )
    coordinator.wait_ready()
    return coordinator


def ask(port, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 8, **more}
    status, _, answer = call(port, "/v1/completions", body)
    return status, answer


def text_of(answer):
    return json.loads(answer)["choices"][0]["text"]


def test_demo():
    words = [sys.executable, "-m", "coordinator", "demo", "--once", "--engine", "microserving", "--prefill", "2"]
    done = subprocess.run([*words, "--port", "0"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "curl" in done.stdout
    assert "<KV-LOST>" not in done.stdout
    assert re.search(r"\d+ tokens from decode d\d, the prompt computed on prefill p\d", done.stdout)


def of_the_page():
    """The pattern that docs/patterns.md shows."""
    (code,) = re.findall(r"^   ```python\n(.*?)^   ```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return textwrap.dedent(code)


def test_the_page_takes_no_more_than_sixty_lines():
    assert len(PAGE.read_text().splitlines()) <= 60


@pytest.mark.parametrize(("name", "workers"), [("CustomRouter", 1), ("CustomRouter", 2), ("MyRouter", 1)])
def test_a_pattern_beside_its_configuration(start, tmp_path, name, workers):
    code = of_the_page() if name == "MyRouter" else (PATTERNS / "tutorial.py").read_text()
    (tmp_path / "my_patterns.py").write_text(code)
    instances = fleet(start, "prefill", "decode", "decode", "hybrid")
    coordinator = front(start, instances[:3], f"my_patterns.py:{name}", workers=workers)
    alone = front(start, instances[3:], "microserving")
    status, wanted = ask(alone.port, IDS)
    assert status == 200
    for _ in range(4):
        status, answer = ask(coordinator.port, IDS)
        assert (status, text_of(answer)) == (200, text_of(wanted))
    status, answer = ask(coordinator.port, PROMPT)
    assert status == 400
    assert b"no tokenizer" in answer
    until(lambda: not any(each.kv_blocks() for each in instances), "KV given back")
    assert coordinator.metric("pd_coordinator_requests_in_flight") == 0


def test_a_client_that_leaves_leaves_no_room_reserved(start):
    instances = fleet(start, "prefill", "decode")
    coordinator = front(start, instances, "microserving")
    instances[0].fault("send_late=3600")
    connection = http.client.HTTPConnection("127.0.0.1", coordinator.port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT}))
    until(lambda: coordinator.metric("pd_coordinator_requests_in_flight") == 1, "it is under way")
    until(instances[1].kv_blocks, "decode has made room")
    connection.close()
    until(lambda: coordinator.metric("pd_coordinator_kv_pinned_requests", instance="d0") == 1, "the room shows")
    instances[0].act("go_on")
    until(lambda: not any(each.kv_blocks() for each in instances), "KV given back")
    until(lambda: coordinator.metric("pd_coordinator_kv_pinned_requests", instance="d0") == 0, "and is gone")
    until(lambda: coordinator.metric("pd_coordinator_aborts_total", result="sent") == 1, "the abort is counted")


def test_a_file_with_a_pattern_is_a_program(start, tmp_path):
    """`serve(...)` at its end runs a coordinator, as the tutorial does it."""
    prefill, decode = fleet(start, "prefill", "decode")
    ports = [int(each.url.rpartition(":")[2]) for each in (prefill, decode)]
    text = (PATTERNS / "tutorial.py").read_text().replace("[9124,9125]", str(ports)).replace("9123", "0")
    gpus = decode.state()["recv_rank"] - prefill.state()["recv_rank"]
    (tmp_path / "program.py").write_text(text.replace("[2,2]", str([gpus, 1])))
    program = start._own(Process("program", [str(tmp_path / "program.py")], tmp_path))
    found = program.said(r"serves on 127\.0\.0\.1 port (\d+)")
    port = int(found.group(1))
    until(lambda: ask(port, IDS)[0] == 200, "it serves")
    assert b"<KV-LOST>" not in ask(port, IDS)[1]
