"""One measurement: fresh engines, a fresh router, clients, and what the router used meanwhile."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import cpu_s, end, free_port, memory_bytes, running
from bench.routers import ROOT, Place, Router, command
from bench.workloads import Workload

READY_S = 60.0
SETTLE_S = 1.0
LIMIT_S = 240.0
Wrap = Callable[[list[str]], list[str]]
Figures = dict[str, Any]


class NotMeasured(Exception):
    """The router did not start, or the run did not end; the text says what was seen."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Engines and a router that is ready."""

    process: subprocess.Popen[bytes]
    url: str
    handoffs_url: str


@contextlib.contextmanager
def bench(router: Router, work: Workload, *, workers: int = 1, wrap: Wrap | None = None) -> Iterator[Bench]:
    """Start engines and router; `wrap` may put another program in front of the router's command.

    Raises:
        NotMeasured: see there.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefill_port, decode_port = stack.enter_context(_engines(router.flavour, work))
        place = Place(free_port(), free_port(), f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}")
        log = folder / "router.log"
        starts = command(router, place, folder, workers)
        process = stack.enter_context(running(wrap(starts) if wrap else starts, log, cwd=folder))
        url = f"http://127.0.0.1:{place.port}/v1/chat/completions"
        _wait_until_ready(process, url, log)
        yield Bench(process, url, f"{place.prefill_url}/handoffs")


def measure(router: Router, work: Workload, *, workers: int = 1) -> Figures:
    """The figures of one run.

    Raises:
        NotMeasured: see there.
    """
    with bench(router, work, workers=workers) as made:
        figures = _hold(made, work) if work.hold_s else _drive(made, work)
        with urllib.request.urlopen(made.handoffs_url, timeout=5) as reply:
            bad = json.load(reply)["bad"]
    if bad:
        figures["wrong"]["handoff"] = bad
    return figures


def _drive(made: Bench, work: Workload) -> Figures:
    clients(made.url, work, requests=min(work.requests, work.concurrency))  # connections and caches are warm
    before_s = cpu_s(made.process.pid)
    figures = clients(made.url, work, requests=work.requests)
    used_us = (cpu_s(made.process.pid) - before_s) * 1e6
    figures["cpu_us_per_request"] = round(used_us / max(figures["done"], 1), 1)
    figures["cpu_us_per_event"] = round(used_us / max(figures["events"], 1), 2)
    return figures


def _hold(made: Bench, work: Workload) -> Figures:
    """Open all streams, then watch them for a while."""
    before_bytes = memory_bytes(made.process.pid)
    with _client_process(made.url, work, 0) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        if client.stdout.readline() != b"open\n":
            raise NotMeasured("not all streams were opened")
        time.sleep(SETTLE_S)
        before_s, begin_s = cpu_s(made.process.pid), time.monotonic()
        time.sleep(work.hold_s)
        used_s, held_s = cpu_s(made.process.pid) - before_s, time.monotonic() - begin_s
        held_bytes = memory_bytes(made.process.pid) - before_bytes
        client.stdin.close()
        figures = _figures(client.stdout.read())
    events = work.concurrency * held_s / (work.step_ms / 1e3)
    figures["cpu_us_per_event"] = round(used_s * 1e6 / events, 2)
    figures["kib_per_stream"] = round(held_bytes / 1024 / work.concurrency, 2)
    return figures


def clients(url: str, work: Workload, requests: int) -> Figures:
    """Let the clients send so many requests.

    Raises:
        NotMeasured: they did not come to an end.
    """
    with _client_process(url, work, requests) as client:
        assert client.stdout is not None
        return _figures(client.stdout.read())


@contextlib.contextmanager
def _client_process(url: str, work: Workload, requests: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "bench.clients", url, "--concurrency", str(work.concurrency), "--requests", str(requests),
        "--tokens", str(work.tokens), "--prompt-bytes", str(work.prompt_bytes), *(["--stream"] if work.stream else []),
        *(["--counting"] if work.counting else []),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            if process.stdin is not None:
                process.stdin.close()
            end(process)


def _figures(said: bytes) -> Figures:
    try:
        figures: Figures = json.loads(said)
    except ValueError:
        raise NotMeasured("the clients did not come to an end") from None
    return figures


@contextlib.contextmanager
def _engines(flavour: str, work: Workload) -> Iterator[tuple[int, int]]:
    command = [
        sys.executable, "-m", "bench.engines", flavour, "--tokens", str(work.tokens), "--step-ms", str(work.step_ms),
        "--prefill-ms", str(work.prefill_ms), "--together", str(work.together),
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            yield ports["prefill"], ports["decode"]
        finally:
            end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    ask = urllib.request.Request(url, body, {"content-type": "application/json"})
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(ask, timeout=5):
            return
        time.sleep(0.1)
    raise NotMeasured("the router is not ready: " + log.read_text(errors="replace")[-500:])
