"""`pd-coordinator demo`: a simulated cluster and the coordinator in one go, and one streamed request to look at."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from coordinator import config
from coordinator.app import App
from coordinator.core.instance import Address
from coordinator.demo_extras import Extras, extras_of
from coordinator.demo_show import Printer, offered_calls, shown_request
from coordinator.observability.logs import Logs, configure
from coordinator.serving import connections_for
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError

MODEL = "demo"
HOST = "127.0.0.1"
READY_S = 30.0
STOP_S = 3.0
PROMPT = "Why does it help to compute the prompt on one instance and the answer on another?"
SHOWN_TOKENS = 48
FIRST_TOKEN_FROM_PREFILL = ("mindie",)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    engine: str
    prefill: int
    decode: int
    port: int
    once: bool


@dataclass(frozen=True, slots=True)
class Started:
    """A simulated instance; `keys`: what its entry in the configuration needs besides the URL."""

    name: str
    role: str
    port: int
    pid: int
    keys: dict[str, object]


class DemoError(Exception):
    """The demo cannot run; the text is for the person in front of it."""


def run(options: Options) -> int:
    """Run the demo; returns the exit status."""
    logs = configure("warning")
    try:
        return uvloop.run(_run(options, logs))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    finally:
        logs.close()


async def _run(options: Options, logs: Logs) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        try:
            extras = await extras_of(options.engine, stack)
        except RuntimeError as error:
            raise DemoError(str(error)) from error
        instances = await _start_instances(options, extras, stack)
        app = await _start_coordinator(options, extras, instances, logs, stack)
        await _until_ready(app, stop)
        _introduce(options, instances, app)
        await _show_request(options, app)
        _offer(options, app)
        if options.once or stop.is_set():
            return 0
        print("Ctrl-C ends it.")
        await stop.wait()
        print("\nstopping")
    return 0


# --- the parts


async def _start_instances(options: Options, extras: Extras, stack: contextlib.AsyncExitStack) -> list[Started]:
    """Start one process per instance."""
    wanted = [(f"p{i}", "prefill") for i in range(options.prefill)] + [
        (f"d{i}", "decode") for i in range(options.decode)
    ]
    if not options.prefill or not options.decode:
        raise DemoError("--prefill and --decode must be 1 or more")
    started = await asyncio.gather(*(_start_instance(options.engine, role, extras.arguments) for _, role in wanted))
    for process, _ in started:
        stack.push_async_callback(_end, process)
    return [
        Started(name, role, _port(line), process.pid, extras.keys(line, number))
        for number, ((name, role), (process, line)) in enumerate(zip(wanted, started, strict=True))
    ]


def _port(line: str) -> int:
    """The port that an instance says it listens on; 0 if it does not say."""
    port = line.rpartition(":")[2].strip()
    return int(port) if port.isdigit() else 0


async def _start_instance(engine: str, role: str, more: Sequence[str]) -> tuple[asyncio.subprocess.Process, str]:
    """The process, and the line in which it says where it is."""
    command = [sys.executable, "-m", "coordinator", "instance", "--engine", engine, "--role", role]
    process = await asyncio.create_subprocess_exec(
        *command, *more, "--port", "0", "--model", MODEL, "--decode-ms", "25", "--prefill-ms", "60",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    line = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
    if not _port(line.decode()):
        said = (await process.stderr.read(2000)).decode("utf-8", "replace").strip() if not line else line.decode()
        await _end(process)
        raise DemoError(f"the simulated {role} instance did not start: {said.splitlines()[-1] if said else 'no word'}")
    return process, line.decode()


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
                return
        process.kill()
        await process.wait()


async def _start_coordinator(
    options: Options, extras: Extras, instances: Sequence[Started], logs: Logs, stack: contextlib.AsyncExitStack
) -> App:
    entries = [{"id": one.name, "role": one.role, "url": f"http://{HOST}:{one.port}", **one.keys} for one in instances]
    document = {
        "server": {
            "port": options.port,
            "management_port": options.port + 1 if options.port else 0,
            "route_headers": True,
        },
        "cluster": {"engine": options.engine, "model": MODEL, "instances": entries, **extras.cluster},
        "engines": {options.engine: extras.engine} if extras.engine else {},
        "limits": {"max_requests": 1000},
        "health": {"interval_s": 1, "recover_after": 1},
    }
    settings = config.parse(json.dumps(document), "demo")
    app = App(settings, logs.access, max_connections=connections_for(settings))
    try:
        await app.start()
    except OSError as error:
        raise DemoError(f"port {options.port} cannot be had ({error.strerror}); choose another with --port") from error
    stack.push_async_callback(app.aclose)
    return app


async def _until_ready(app: App, stop: asyncio.Event) -> None:
    deadline_s = time.monotonic() + READY_S
    while not app.cluster.ready_pair()[0]:
        if time.monotonic() > deadline_s:
            raise DemoError(f"the cluster did not become ready: {app.cluster.ready_pair()[1]}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await stop.wait()
                raise DemoError("stopped before the cluster was ready")


# --- what is shown


def _introduce(options: Options, instances: Sequence[Started], app: App) -> None:
    print(f"A simulated {options.engine} cluster, {options.prefill} prefill and {options.decode} decode instances:\n")
    for one in instances:
        where = f"{one.name}  {one.role:<8} http://{HOST}:{one.port}"
        print(f"  {where}  (process {one.pid}: kill it and watch the others take over)")
    print(f"\nThe coordinator serves on http://{HOST}:{app.server.port}.")
    print(f"What goes on, live in a browser: {_management_url(app)}/\n\n> {PROMPT}\n")


def _management_url(app: App) -> str:
    return f"http://{HOST}:{app.management.addresses['management'][1]}"


async def _show_request(options: Options, app: App) -> None:
    """Send one streamed request through the front door and print it as it arrives."""
    path, body = shown_request(options.engine, MODEL, PROMPT, SHOWN_TOKENS)
    client = HttpClient(connect_s=5)
    printer = Printer()
    try:
        stream = await client.open_stream(
            Address(HOST, app.server.port), b"POST", path,
            ((b"content-type", b"application/json"),), body, sink=printer,
        )  # fmt: skip
        async with asyncio.timeout(READY_S):
            await printer.done
        stream.close()
    except (TransportError, TimeoutError) as error:
        raise DemoError("the request was not answered") from error
    finally:
        await client.aclose()
    print(f"\n\n{printer.summary(options.engine in FIRST_TOKEN_FROM_PREFILL)}")


def _offer(options: Options, app: App) -> None:
    print("\nWithout --once it stays up, for you to try:\n" if options.once else "\nTry it yourself:\n")
    for what, line in offered_calls(options.engine, MODEL, f"http://{HOST}:{app.server.port}", _management_url(app)):
        print(f"  # {what}\n  {line}\n")
