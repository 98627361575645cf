"""One process that serves: logs, open files, signals, and the way from start to exit status."""

import asyncio
import contextlib
import logging
import resource
import signal
from importlib.metadata import version
from pathlib import Path

import uvloop

from coordinator import config
from coordinator.app import App
from coordinator.config import Settings
from coordinator.observability.logs import Logs, configure
from coordinator.parts import DISTRIBUTION, load_settings, settle_memory
from coordinator.workers.supervisor import Supervisor

LOG = logging.getLogger("pd_coordinator")
FILES_FOR_OURSELVES = 64
FILES_PER_INSTANCE = 2  # a standing stream and a health check
FILES_PER_REQUEST = 3  # the client's connection and one to each engine
FAILED = 1
HURRIED = 1
HURRY_S = 0.5  # for closing, and for the aborts that engines are due, once a second signal has come


def serve(path: Path) -> int:
    """Run the service until it is told to stop; returns the exit status.

    Raises:
        ConfigError: the file cannot be used; nothing was started.
    """
    settings = load_settings(path)
    logs = configure(settings.logging.level, settings.logging.format, levels=settings.logging.levels)
    try:
        return uvloop.run(_serve(settings, path, logs))
    finally:
        logs.close()


async def _serve(settings: Settings, path: Path, logs: Logs) -> int:
    connections = connections_for(settings)
    app: App | Supervisor
    if settings.server.workers > 1:
        app = Supervisor(settings, max_connections=connections, path=path)
    else:
        app = App(settings, logs.access, max_connections=connections, path=path)
    logs.belongs_to(app.renewal.belonging)
    app.renewal.on_logging = lambda logging: logs.apply(logging.level, logging.format, logging.levels)
    stop = asyncio.Event()
    hurry = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    loop.add_signal_handler(signal.SIGHUP, app.hang_up)
    try:
        await app.start()
    except OSError as error:
        LOG.error("cannot listen: %s", error.strerror or error)
        return FAILED
    _greet(settings, app)
    settle_memory()
    await stop.wait()
    LOG.info("draining: no new requests, %d live ones may end", app.control.work.live())
    return await _leave(app, hurry)


async def _leave(app: App | Supervisor, hurry: asyncio.Event) -> int:
    """Drain and close; a second signal cuts that short."""
    leaving = asyncio.create_task(_drain_and_close(app), name="leave")
    hurrying = asyncio.create_task(hurry.wait(), name="second signal")
    await asyncio.wait({leaving, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    done = leaving.done()
    for task in (leaving, hurrying):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if not done:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HURRY_S):
                await app.aclose()
    LOG.info("stopped" if done else "stopped at once by a second signal")
    return 0 if done else HURRIED


async def _drain_and_close(app: App | Supervisor) -> None:
    await app.drain()
    await app.aclose()


def _greet(settings: Settings, app: App | Supervisor) -> None:
    server = settings.server
    host, port = app.management.addresses["management"]
    LOG.info(
        "pd-coordinator %s serves on %s port %d, management on %s port %d, %d instances of %s",
        version(DISTRIBUTION),
        server.host,
        app.port,
        host,
        port,
        len(settings.cluster.instances),
        settings.source.name,
    )
    for note in config.notes(settings):
        LOG.warning("%s", note)


def connections_for(settings: Settings) -> int:
    """Raise the limit of open files as far as it goes; returns how many clients it leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.limits.wanted_files
    if soft < wanted:
        LOG.warning(
            "open files are limited to %d, limits.max_requests %d may need %d: further clients will wait",
            soft,
            settings.limits.max_requests,
            wanted,
        )
    ours = FILES_FOR_OURSELVES + FILES_PER_INSTANCE * len(settings.cluster.instances)
    return max(8, (soft - ours) // FILES_PER_REQUEST)
