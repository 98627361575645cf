"""A file that cannot be used: every problem is told, nothing is started."""

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli import main

PAIR = """
  instances:
    - {role: prefill, url: "http://127.0.0.1:9001"}
    - {role: decode, url: "http://127.0.0.1:9002"}
"""
# text of the file, and what must be said about it: line, key path, reason or hint
CASES = {
    "typo in a section": (f"cluster:{PAIR}timeout:\n  connect_s: 3\n", [":5: timeout:", "did you mean 'timeouts'?"]),
    "typo in a key": (f"cluster:{PAIR}limits:\n  max_request: 3\n", [":6: limits.max_request:", "'max_requests'"]),
    "engine": (f"cluster:\n  engine: mindi{PAIR}", [":2: cluster.engine:", "did you mean 'mindie'?"]),
    "policy": (f"cluster:{PAIR}scheduling: {{policy: load_balanc}}\n", [":5: scheduling.policy", "load_balance"]),
    "role": (
        'cluster:\n  instances:\n    - role: prefil\n      url: "http://127.0.0.1:1"\n',
        [":3: cluster.instances[0].role:", "did you mean 'prefill'?"],
    ),
    "no url": ("cluster:\n  instances:\n    - role: prefill\n", ["cluster.instances[0].url:"]),
    "no scheme": (
        "cluster:\n  instances:\n    - role: decode\n      url: 127.0.0.1:9001\n",
        [":4: cluster.instances[0].url:", "did you mean 'http://127.0.0.1:9001'?"],
    ),
    "port 0": (
        'cluster:\n  instances:\n    - role: decode\n      url: "http://127.0.0.1:0"\n',
        [":4: cluster.instances[0].url:"],
    ),
    "port": (f"cluster:{PAIR}server: {{port: 70000}}\n", [":5: server.port:", "at most 65535"]),
    "text for a number": (f'cluster:{PAIR}server: {{port: "1025"}}\n', [":5: server.port:", "whole number"]),
    "same address twice": (
        "cluster:\n  instances:\n" + '    - {role: decode, url: "http://127.0.0.1:1"}\n' * 2,
        ["cluster.instances[1]"],
    ),
    "engine's own key": (
        'cluster:\n  instances:\n    - {role: decode, url: "http://127.0.0.1:1", inter_com_port: 3}\n',
        [":3: cluster.instances[0].inter_com_port:", "did you mean 'inter_comm_port'?"],
    ),
    "key twice": (f"cluster:{PAIR}limits: {{}}\nlimits: {{}}\n", [":6:", "limits"]),
    "no YAML": ("cluster: [\n", ["cluster.yaml"]),
    "empty": ("", ["empty"]),
    "two problems": (
        f"cluster:{PAIR}server: {{prt: 1}}\nhealth: {{fail_after: 0}}\n",
        [":5: server.prt:", ":6: health.fail_after:"],
    ),
}  # fmt: skip


def run(command: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command on a file."""
    words = [sys.executable, "-m", "coordinator", command, "--config", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("case", CASES)
def test_check_tells_file_place_and_reason(tmp_path: Path, capsys, case: str):
    """In this process: `test_serve_says_the_same_and_starts_nothing` shows that a process of its own says the same."""
    text, words = CASES[case]
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["check", "--config", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(str(path))
    for word in words:
        assert word in said.err
    assert len(said.err.splitlines()) == (2 if case == "two problems" else 1)
    assert "Traceback" not in said.err


def test_serve_says_the_same_and_starts_nothing(tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CASES["typo in a key"][0])
    done, checked = run("serve", path), run("check", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == checked.stderr  # no line about listening or instances before or after it


@pytest.mark.parametrize("command", ["check", "serve"])
def test_no_such_file(tmp_path: Path, command: str):
    done = run(command, tmp_path / "nothing.yaml")
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_serve_on_a_busy_port_ends_with_one_clear_line(start):
    """The port of another coordinator that runs."""
    first = start.coordinator({"server": {"port": 0, "management_port": 0}})
    path = first.config_path.with_name("second.yaml")
    path.write_text(f"server: {{port: {first.port}, management_port: 0}}\n")
    done = run("serve", path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if " ERROR " in line]
    assert "cannot listen" in line
    assert "Traceback" not in done.stderr
