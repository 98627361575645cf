"""Real processes for the end-to-end tests: started, waited for, stopped, and their logs looked at.

Whatever is started here dies with the process that started it, even if that is killed.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

HOST = "127.0.0.1"
START_S = 30.0
STOP_S = 30.0
POLL_S = 0.01
# the kernel kills the child when its parent is gone (prctl PR_SET_PDEATHSIG, SIGKILL)
LAUNCHER = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1,9); os.execv(sys.argv[1],sys.argv[1:])"
FLEET = str(Path(__file__).with_name("fleet_process.py"))
NEVER_IN_A_LOG = ("Traceback", "never retrieved", "never awaited", "Task was destroyed", "unclosed", "Warning: ")


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: who reads it meanwhile sees the one before, not an empty one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def until(check: Callable[[], Any], what: str, within_s: float = 20.0) -> Any:
    """Ask again and again until the answer is true, and return it; fails the test after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while not (found := check()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(POLL_S)
    return found


def call(
    port: int, path: str, body: object = None, *, method: str = "", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """One plain HTTP call to a port of this machine: status, headers (lower case), body."""
    connection = http.client.HTTPConnection(HOST, port, timeout=20)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, dict(headers or {}))
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def call_json(port: int, path: str, body: object = None, *, method: str = "") -> Any:
    """The same for a call that must answer 2xx with JSON."""
    status, _, data = call(port, path, body, method=method)
    assert status // 100 == 2, (path, status, data)
    return json.loads(data)


def sockets_of(pid: int) -> list[list[str]]:
    """The TCP sockets of a process, as the fields of /proc/net/tcp."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [fields for fields in rows if fields[9] in inodes]


def port_in(address: str) -> int:
    """The port of an address in /proc/net/tcp."""
    return int(address.rpartition(":")[2], 16)


def listens(pid: int, port: int) -> bool:
    """Whether a process listens on a port."""
    with suppress(OSError):
        return any(fields[3] == "0A" and port_in(fields[1]) == port for fields in sockets_of(pid))
    return False


class Process:
    """A child process whose output goes to a file.

    Args:
        name: for the file and for messages.
        command: what follows the interpreter.
        folder: where the log is written.
    """

    def __init__(self, name: str, command: Iterable[str], folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}-{time.monotonic_ns()}.log"
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-IS", "-c", LAUNCHER, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def log(self) -> str:
        """Everything that it has written so far."""
        return self.log_path.read_text("utf-8", "replace")

    def said(self, pattern: str, within_s: float = START_S) -> re.Match[str]:
        """Wait until its output matches; fails at once if it has ended without."""

        def look() -> re.Match[str] | None:
            ended = not self.running
            found = re.search(pattern, self.log())
            assert found or not ended, f"{self.name} ended with {self._popen.returncode}:\n{self.log()}"
            return found

        match: re.Match[str] = until(look, f"{self.name} says {pattern!r}", within_s)
        return match

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    def wait(self, within_s: float = STOP_S) -> int:
        """Wait for its end; returns the exit status."""
        try:
            return self._popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {within_s:g} s:\n{self.log()[-4000:]}") from None

    def kill(self) -> None:
        """End it as a power cut would; nothing happens if it has ended."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        """SIGTERM; it must end by itself with status 0, and have logged nothing that no log should have."""
        if self.running:
            self.signal(signal.SIGTERM)
            status = self.wait()
            assert status == 0, f"{self.name} ended with {status}:\n{self.log()[-4000:]}"
        self.check_log()

    def check_log(self) -> None:
        """Demand a log without tracebacks and the like."""
        log = self.log()
        for words in NEVER_IN_A_LOG:
            assert words not in log, f"{words!r} in the log of {self.name}:\n{log[-8000:]}"


class Simulator:
    """What tests ask a simulated instance, wherever it runs."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.port = int(url.rpartition(":")[2])

    def state(self) -> dict[str, Any]:
        """Its `/sim/state`."""
        state: dict[str, Any] = call_json(self.port, "/sim/state")
        return state

    def kv_blocks(self) -> int:
        """KV blocks that are held, for work or for a peer."""
        kv = self.state()["kv"]
        return int(kv["allocated"]) + int(kv["pinned"])

    def fault(self, *faults: str) -> None:
        """Set exactly these faults."""
        call_json(self.port, "/sim/faults", {"set": list(faults)})

    def act(self, do: str, value: str = "") -> None:
        """Make something happen on the spot."""
        call_json(self.port, "/sim/act", {"do": do, "value": value})


class Fleet(Process):
    """Simulated instances, all in one process."""

    def __init__(self, options: list[dict[str, Any]], folder: Path) -> None:
        super().__init__("instances", [FLEET, json.dumps(options)], folder)
        urls = json.loads(self.said(r"READY (\[.*\])").group(1))
        self.instances = [Simulator(url, given["role"]) for url, given in zip(urls, options, strict=True)]


class InstanceProcess(Process, Simulator):
    """One simulated instance in a process of its own, as `pd-coordinator instance` starts it."""

    def __init__(self, role: str, arguments: Iterable[str], folder: Path, port: int) -> None:
        self._arguments = tuple(arguments)
        self._folder = folder
        command = ["-m", "coordinator", "instance", "--role", role, "--port", str(port), *self._arguments]
        Process.__init__(self, role, command, folder)
        Simulator.__init__(self, self.said(r"instance \S+ (?:.*, )?at (http://\S+)").group(1), role)

    def again(self) -> "InstanceProcess":
        """A successor at the same address, after this one has ended."""
        return InstanceProcess(self.role, self._arguments, self._folder, self.port)


class Coordinator(Process):
    """`pd-coordinator serve`. Its ports are free ones, learnt from its log."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.config_path = folder / f"cluster-{time.monotonic_ns()}.yaml"
        self.write_config(config)
        super().__init__("coordinator", ["-m", "coordinator", "serve", "--config", str(self.config_path)], folder)
        ports = self.said(r"serves on \S+ port (\d+), management on \S+ port (\d+)")
        self.port, self.management_port = int(ports.group(1)), int(ports.group(2))
        self.url = f"http://{HOST}:{self.port}"

    def write_config(self, config: Mapping[str, Any] | str) -> None:
        """Replace its file as editors do: all of it at once."""
        replace_file(self.config_path, config if isinstance(config, str) else json.dumps(config))  # JSON is YAML

    def manage(self, path: str, body: object = None, *, method: str = "") -> Any:
        """A call to the management plane that must succeed."""
        return call_json(self.management_port, path, body, method=method)

    def ready(self) -> bool:
        """What `/v1/readiness` says."""
        return call(self.management_port, "/v1/readiness")[0] == 200

    def wait_ready(self, within_s: float = START_S) -> None:
        """Wait until requests can be placed."""
        until(self.ready, "the cluster is ready", within_s)

    def states(self) -> dict[str, str]:
        """State of each instance by its id."""
        return {row["id"]: row["state"] for row in self.manage("/v1/instances")["instances"]}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels."""
        return sum(
            sample.value
            for family in self.metric_families()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def metric_families(self) -> list[Any]:
        """All metrics."""
        status, _, page = call(self.management_port, "/metrics")
        assert status == 200
        return list(text_string_to_metric_families(page.decode()))

    def loads(self) -> dict[str, float]:
        """Every gauge that counts live work."""
        names = ("requests_in_flight", "requests_queued", "instance_in_flight", "kv_pinned_requests")
        return {name: self.metric(f"pd_coordinator_{name}") for name in names}

    def wait_idle(self, within_s: float = 15.0) -> None:
        """Wait until no gauge shows live work."""
        until(lambda: not any(self.loads().values()), f"gauges at zero, not {self.loads()}", within_s)
