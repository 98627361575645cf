"""One process that serves, seen from outside: signals and exit statuses."""

import asyncio
import contextlib
import json
import re
import signal
import sys

import pytest
from app_world import can_listen, document, entry
from engine_world import until
from fake_instances import FakeInstance

START_S = 20.0
END_S = 20.0


class Running:
    """A `serve` process on ports of its own."""

    def __init__(self, tmp_path, free_port, **given):
        self.ports = {"port": free_port(), "management_port": free_port()}
        self.path = tmp_path / "cluster.yaml"
        self.given = given
        self.lines = []

    async def start(self, *instances):
        self.path.write_text(
            json.dumps(document(*instances, server=self.ports, limits={"max_requests": 100}, **self.given))
        )
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "coordinator", "serve", "--config", str(self.path),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return self

    async def said(self, pattern):
        """Read its log up to a line that matches."""
        async with asyncio.timeout(START_S):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"it did not say {pattern!r}: {''.join(self.lines)}")

    async def has_said(self, *patterns):
        """Read its log until each of these has matched a line, in whatever order they come."""
        for pattern in patterns:
            if not any(re.search(pattern, line) for line in self.lines):
                await self.said(pattern)

    async def ended(self, within_s):
        """Its exit status; what it said up to the end is read."""
        async with asyncio.timeout(within_s):
            self.lines += (await self.process.stderr.read()).decode().splitlines()
            return await self.process.wait()


@pytest.fixture
async def serving(tmp_path, free_port):
    started = []

    async def start(*instances, **given):
        started.append(Running(tmp_path, free_port, **given))
        return await started[-1].start(*instances)

    yield start
    for running in started:
        with contextlib.suppress(ProcessLookupError):
            running.process.kill()
        await running.process.wait()


@pytest.fixture
async def fake():
    made = await FakeInstance().listen()
    yield made
    await made.aclose()


async def test_a_port_that_is_taken(fake, tmp_path, free_port):
    running = Running(tmp_path, free_port)
    running.ports["port"] = fake.address.port
    await running.start()
    assert await running.ended(START_S) == 1
    assert len(running.lines) == 1
    assert "cannot listen" in running.lines[0]
    assert "Traceback" not in running.lines[0]
    assert can_listen(running.ports["management_port"])


async def test_reload_and_an_orderly_end(serving):
    running = await serving(entry("h0"))
    await running.said("serves on")
    running.path.write_text(json.dumps(document(entry("h0"), entry("h1", port=10), server=running.ports)))
    running.process.send_signal(signal.SIGHUP)
    await running.said("reloaded: added h1, removed none")
    running.path.write_text("{")
    running.process.send_signal(signal.SIGHUP)
    await running.said("ERROR.*not reloaded")
    running.process.send_signal(signal.SIGTERM)
    await running.said("draining")
    assert await running.ended(END_S) == 0
    assert not [line for line in running.lines if "Traceback" in line or "never retrieved" in line]
    assert all(map(can_listen, running.ports.values()))


async def test_a_second_signal_hurries(serving, fake):
    async def mute(call):
        await call.left()

    fake.infer = mute
    running = await serving(entry("h0", fake), timeouts={"drain_s": 60})
    await running.has_said("serves on", "h0 is ready")
    body = b'{"model":"m","messages":[1]}'
    _, writer = await asyncio.open_connection("127.0.0.1", running.ports["port"])
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await until(lambda: fake.calls)
    running.process.send_signal(signal.SIGTERM)
    await running.said("draining")
    running.process.send_signal(signal.SIGTERM)
    assert await running.ended(END_S) == 1
    assert "second signal" in running.lines[-1]
    assert not [line for line in running.lines if "Traceback" in line or "never retrieved" in line]
    writer.close()
