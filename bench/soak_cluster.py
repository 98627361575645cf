"""The processes of the soak: simulated instances, some of them killed now and then, and the coordinator."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from soak_clients import HOST, MODEL

START_S, STOP_S = 30.0, 20.0
DOWN_S = 3.0  # how long a killed instance stays away
POLL_S = 0.1
GAUGES = ("requests_in_flight", "requests_queued", "instance_in_flight", "kv_pinned_requests")
NEVER_IN_A_LOG = (
    "Traceback",
    "never retrieved",
    "never awaited",
    "Task was destroyed",
    "failed inside the coordinator",
)
# the kernel kills the child when its parent is gone (prctl PR_SET_PDEATHSIG, SIGKILL)
LAUNCHER = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1,9); os.execv(sys.argv[1],sys.argv[1:])"
INSTANCE = ("--model", MODEL, "--prefill-ms", "20", "--prefill-lanes", "64", "--decode-ms", "40", "--jitter", "0.3")
OPEN = build_opener(ProxyHandler({})).open


class CannotRun(Exception):
    """The cluster did not start."""


class Process:
    """A child with a log of its own."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}-{time.monotonic_ns()}.log"
        command = [sys.executable, "-IS", "-c", LAUNCHER, sys.executable, "-m", "coordinator", *arguments]
        with self.log_path.open("wb") as log:
            self._popen = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    async def said(self, pattern: str) -> re.Match[str]:
        """Wait until its log matches."""
        deadline_s = time.monotonic() + START_S
        while (found := re.search(pattern, self.log())) is None:
            if not self.running or time.monotonic() > deadline_s:
                raise CannotRun(f"{self.name} did not start:\n{self.log()[-2000:]}")
            await asyncio.sleep(POLL_S)
        return found

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    async def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self._popen.terminate()
        try:
            return await asyncio.to_thread(self._popen.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    def memory_mib(self) -> float:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._popen.pid}/status").read_text())
        return int(found.group(1)) / 1024 if found else 0.0

    def files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._popen.pid}/fd").iterdir())


class Instance(Process):
    """A simulated instance that can be killed and come back at its address."""

    def __init__(self, role: str, folder: Path, port: int = 0) -> None:
        super().__init__(role, ["instance", "--role", role, "--port", str(port), *INSTANCE], folder)
        self.role, self.port = role, port

    async def started(self) -> None:
        self.port = int((await self.said(r"instance \S+ at http://[\d.]+:(\d+)")).group(1))


class Cluster:
    """Everything that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ended: list[Process] = []
        self.instances = [Instance(role, folder) for role in ("prefill", "prefill", "decode", "decode")]
        self.coordinator: Process | None = None
        self.port = self._management_port = 0

    async def start(self) -> Process:
        """Instances, then the coordinator; returns when it is ready."""
        for instance in self.instances:
            await instance.started()
        rows = [{"role": i.role, "url": f"http://{HOST}:{i.port}"} for i in self.instances]
        config = {
            "server": {"port": 0, "management_port": 0},
            "cluster": {"engine": "mindie", "model": MODEL, "instances": rows},
            "health": {"interval_s": 0.5, "timeout_s": 1, "fail_after": 2, "recover_after": 1},
            "logging": {"level": "info"},
        }
        path = self._folder / "cluster.yaml"
        path.write_text(json.dumps(config))
        self.coordinator = Process("coordinator", ["serve", "--config", str(path)], self._folder)
        ports = await self.coordinator.said(r"serves on \S+ port (\d+), management on \S+ port (\d+)")
        self.port, self._management_port = int(ports.group(1)), int(ports.group(2))
        if not await settled(lambda: "ready" if set(self.states()) == {"ready"} else "", START_S):
            raise CannotRun(f"not ready: {self.coordinator.log()[-2000:]}")
        return self.coordinator

    def _get(self, port: int, path: str) -> bytes:
        with OPEN(f"http://{HOST}:{port}{path}", timeout=10) as reply:
            data: bytes = reply.read()
            return data

    def states(self) -> list[str]:
        rows = json.loads(self._get(self._management_port, "/v1/instances"))["instances"]
        return [row["state"] for row in rows]

    def gauges(self) -> dict[str, float]:
        page = self._get(self._management_port, "/metrics").decode()
        found = re.findall(r"^pd_coordinator_(\w+)(?:{.*})? (\S+)$", page, re.MULTILINE)
        return {name: sum(float(value) for key, value in found if key == name) for name in GAUGES}

    def kv_blocks(self) -> int:
        states = [json.loads(self._get(i.port, "/sim/state"))["kv"] for i in self.instances]
        return sum(state["allocated"] + state["pinned"] for state in states)

    def kv_held(self) -> list[dict[str, Any]]:
        """Who still holds KV: instance, request and why."""
        states = [(i.log_path.name, json.loads(self._get(i.port, "/sim/state"))["kv"]) for i in self.instances]
        return [{"instance": name, **held} for name, state in states for held in state["held"]]

    async def replace(self, number: int) -> None:
        """Kill an instance, and start it again a little later."""
        self.instances[number].kill()
        await asyncio.sleep(DOWN_S)
        await self.revive()

    async def revive(self) -> None:
        """Start what was killed."""
        for number, old in enumerate(self.instances):
            if not old.running:
                self.ended.append(old)
                self.instances[number] = Instance(old.role, self._folder, old.port)
                await self.instances[number].started()

    async def stop(self) -> dict[str, int]:
        """Stop all; returns exit statuses that are not 0."""
        running = [*([self.coordinator] if self.coordinator else []), *self.instances]
        statuses = {process.log_path.name: await process.stop() for process in running}
        self.ended += running
        return {name: status for name, status in statuses.items() if status}

    def kill(self) -> None:
        for process in [*([self.coordinator] if self.coordinator else []), *self.instances]:
            process.kill()

    def bad_words(self) -> list[str]:
        """What stands in logs and never should."""
        logs = {process.log_path.name: process.log() for process in self.ended}
        return [f"{words!r} in {name}" for name, log in logs.items() for words in NEVER_IN_A_LOG if words in log]


async def settled(check: Callable[[], Any], within_s: float) -> Any:
    """Ask until the answer is true, at most `within_s`; returns the last answer."""
    deadline_s = time.monotonic() + within_s
    while not (found := await asyncio.to_thread(check)) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return found
