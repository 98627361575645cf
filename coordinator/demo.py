"""`pd-coordinator demo`: a simulated cluster and the coordinator in one go, and one streamed request to look at."""

import asyncio
import contextlib
import json
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from coordinator import config
from coordinator.app import App
from coordinator.core.instance import Address
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
    keys: dict[str, int]


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
        instances = await _start_instances(options, stack)
        app = await _start_coordinator(options, instances, logs, stack)
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


async def _start_instances(options: Options, stack: contextlib.AsyncExitStack) -> list[Started]:
    """Start one process per instance."""
    wanted = [(f"p{i}", "prefill") for i in range(options.prefill)] + [
        (f"d{i}", "decode") for i in range(options.decode)
    ]
    if not options.prefill or not options.decode:
        raise DemoError("--prefill and --decode must be 1 or more")
    started = await asyncio.gather(*(_start_instance(options.engine, role) for _, role in wanted))
    for process, _ in started:
        stack.push_async_callback(_end, process)
    return [
        Started(name, role, _port(line), process.pid, _keys(line))
        for (name, role), (process, line) in zip(wanted, started, strict=True)
    ]


def _port(line: str) -> int:
    """The port that an instance says it listens on; 0 if it does not say."""
    port = line.rpartition(":")[2].strip()
    return int(port) if port.isdigit() else 0


def _keys(line: str) -> dict[str, int]:
    """What a coordinator must be told besides the URL."""
    port = re.search(r"bootstrap port (\d+)", line)
    return {"bootstrap_port": int(port.group(1))} if port else {}


async def _start_instance(engine: str, role: str) -> tuple[asyncio.subprocess.Process, str]:
    """The process, and the line in which it says where it is."""
    command = [sys.executable, "-m", "coordinator", "instance", "--engine", engine, "--role", role]
    process = await asyncio.create_subprocess_exec(
        *command, "--port", "0", "--model", MODEL, "--decode-ms", "25", "--prefill-ms", "60",
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
    options: Options, instances: Sequence[Started], logs: Logs, stack: contextlib.AsyncExitStack
) -> App:
    entries = [{"id": one.name, "role": one.role, "url": f"http://{HOST}:{one.port}", **one.keys} for one in instances]
    document = {
        "server": {
            "port": options.port,
            "management_port": options.port + 1 if options.port else 0,
            "route_headers": True,
        },
        "cluster": {"engine": options.engine, "model": MODEL, "instances": entries},
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
    print(f"\nThe coordinator serves on http://{HOST}:{app.server.port}.\n\n> {PROMPT}\n")


async def _show_request(options: Options, app: App) -> None:
    """Send one streamed chat request through the front door and print it as it arrives."""
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": SHOWN_TOKENS,
        "messages": [{"role": "user", "content": PROMPT}],
    }
    client = HttpClient(connect_s=5)
    printer = _Printer()
    try:
        stream = await client.open_stream(
            Address(HOST, app.server.port), b"POST", "/v1/chat/completions",
            ((b"content-type", b"application/json"),), json.dumps(body).encode(), sink=printer,
        )  # fmt: skip
        async with asyncio.timeout(READY_S):
            await printer.done
        stream.close()
    except (TransportError, TimeoutError) as error:
        raise DemoError("the request was not answered") from error
    finally:
        await client.aclose()
    print(f"\n\n{printer.summary(options.engine in FIRST_TOKEN_FROM_PREFILL)}")


class _Printer:
    """Prints the text of a chat stream and remembers when it came."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent_s = time.monotonic()
        self._times_s: list[float] = []
        self._rest = b""
        self._route: dict[bytes, bytes] = {}
        self._status = 0

    def head(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self._status, self._route = status, dict(headers)

    def data(self, data: bytes, now_s: float) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data:").strip()
            if payload in (b"", b"[DONE]"):
                continue
            choices = json.loads(payload).get("choices") or [{}]
            text = choices[0].get("delta", {}).get("content")
            if text:
                self._times_s.append(now_s)
                print(text, end="", flush=True)

    def end(self, now_s: float) -> None:  # noqa: ARG002  # the sink's signature
        if not self.done.done():
            self.done.set_result(None)

    def lost(self, error: TransportError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def summary(self, first_from_prefill: bool) -> str:  # noqa: FBT001  # says what it is where it is called
        """One line on where the answer came from and how fast."""
        if not self._times_s:
            return f"no token came (status {self._status})"
        ttft_ms = (self._times_s[0] - self._sent_s) * 1000
        gaps = len(self._times_s) - 1
        itl_ms = (self._times_s[-1] - self._times_s[0]) / gaps * 1000 if gaps else math.nan
        prefill, decode = (self._route.get(name, b"?").decode() for name in (b"x-pd-prefill", b"x-pd-decode"))
        if not first_from_prefill:
            return (
                f"{len(self._times_s)} tokens from decode {decode}, the prompt computed on prefill {prefill}: "
                f"the first one after {ttft_ms:.0f} ms, then {itl_ms:.0f} ms apart."
            )
        return (
            f"{len(self._times_s)} tokens: the first one from prefill {prefill} after {ttft_ms:.0f} ms, "
            f"the others from decode {decode}, {itl_ms:.0f} ms apart."
        )


def _offer(options: Options, app: App) -> None:
    url, port = f"http://{HOST}:{app.server.port}", app.management.addresses["management"][1]
    lines = [
        ("OpenAI chat", f"curl -N {url}/v1/chat/completions -d "
         f"'{{\"model\":\"{MODEL}\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'"),
        ("OpenAI completions", f"curl {url}/v1/completions -d '{{\"model\":\"{MODEL}\",\"prompt\":\"Hello\"}}'"),
    ]  # fmt: skip
    native = {
        "sglang": [("SGLang", f'curl {url}/generate -d \'{{"text":"Hello"}}\'')],
        "mindie": [
            ("TGI", f'curl -N {url}/generate_stream -d \'{{"inputs":"Hello"}}\''),
            ("vLLM", f'curl {url}/generate -d \'{{"prompt":"Hello"}}\''),
            ("Triton", f'curl {url}/v2/models/{MODEL}/generate -d \'{{"text_input":"Hello"}}\''),
            ("MindIE", f'curl {url}/infer -d \'{{"inputs":"Hello","stream":false}}\''),
        ],
    }
    lines += native.get(options.engine, [])
    lines += [
        ("instances", f"curl http://{HOST}:{port}/v1/instances"),
        ("metrics", f"curl http://{HOST}:{port}/metrics"),
    ]
    print("\nTry it yourself, while it runs:\n" if options.once else "\nTry it yourself:\n")
    for what, line in lines:
        print(f"  # {what}\n  {line}\n")
