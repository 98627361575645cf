"""gRPC towards one worker: its channel, its calls, its health. The only module that imports grpc."""

import asyncio
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC reads it once; it writes to standard error past our log

import grpc
from grpc import aio

from coordinator.core.errors import EngineFailed, RequestError
from coordinator.core.instance import Instance
from coordinator.engines.disaggpb.settings import ChannelSettings, Tls
from coordinator.engines.disaggpb.status import call_failed
from coordinator.engines.http_leg import side_of
from coordinator.wire.disaggpb import HEALTH_METHOD, SERVING, WireError, read_health

FIRST_WAIT_MS = 100
LONGEST_CONNECT_MS = 20000
PARTING_S = 1.0
RETIRE_S = 86400.0
LATE_S = 0.5  # a deadline is the dispatcher's to tell; the worker's own comes a moment later
GET_READY = grpc.ChannelConnectivity.READY
Request = Callable[[], bytes]
"""Gives a call's serialised request, once; so that nobody keeps it for as long as the call."""


class Worker:
    """One worker and the channel to it, which connects as soon as it is made and whenever it has to.

    For one event loop. Environment variables of gRPC for proxies are not looked at.
    """

    def __init__(self, instance: Instance, settings: ChannelSettings, connect_s: float) -> None:
        self.instance = instance
        self.send_bytes = settings.send_bytes
        self._connect_s = connect_s
        self.partings = Partings()
        target, options = instance.address.netloc, _channel_options(settings, connect_s)
        if instance.address.tls:
            self._channel = aio.secure_channel(target, _credentials(settings.tls), options=options)
        else:
            self._channel = aio.insecure_channel(target, options=options)
        self._channel.get_state(try_to_connect=True)

    async def call(self, method: str, request: Request, finished_s: float) -> "Call":
        """Begin a server-streaming call, on a connection that is there within `timeouts.connect_s`.

        Cancellation while it connects leaves nothing; afterwards the call has to be ended by its owner.

        Args:
            method: its full name.
            request: gives the request's bytes.
            finished_s: when it must have ended (monotonic); infinity: never.

        Raises:
            EngineFailed: there is no connection.
        """
        await self._connected()
        left_s = None if math.isinf(finished_s) else max(0.0, finished_s - time.monotonic()) + LATE_S
        try:
            start: aio.UnaryStreamMultiCallable[Request, bytes] = self._channel.unary_stream(method, _serialised)
            made = start(request, timeout=left_s)
        except aio.UsageError as error:
            raise self._gone() from error
        return Call(self.instance, made, self.partings)

    async def probe(self, within_s: float) -> None:
        """Ask for the worker's health; one that has no health service shows by saying so that it is alive.

        Raises:
            EngineFailed: it cannot be reached, does not answer in time, or says that it does not serve.
        """
        ask: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(HEALTH_METHOD)
        try:
            async with asyncio.timeout(within_s):
                await self._connected()
                answer = await ask(b"", timeout=within_s)
            status = read_health(answer)
        except TimeoutError:
            raise EngineFailed(side_of(self.instance), self.instance.id, "timeout", connecting=True) from None
        except WireError as error:
            raise EngineFailed(side_of(self.instance), self.instance.id, "bad_reply", detail=str(error)) from error
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise _as_failure(self.instance, error) from error
            return
        except aio.UsageError as error:
            raise self._gone() from error
        if status != SERVING:
            detail = f"health status {status}"
            raise EngineFailed(side_of(self.instance), self.instance.id, "engine_error", detail=detail)

    async def _connected(self) -> None:
        """Wait for a connection, or for gRPC to know that there is none: a call then fails at once and says why."""
        state = self._channel.get_state(try_to_connect=True)
        if state is GET_READY:
            return
        try:
            async with asyncio.timeout(None if math.isinf(self._connect_s) else self._connect_s):
                while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise EngineFailed(side_of(self.instance), self.instance.id, "connect_timeout", connecting=True) from None
        except (aio.UsageError, aio.InternalError) as error:
            raise self._gone() from error

    def _gone(self) -> EngineFailed:
        return EngineFailed(side_of(self.instance), self.instance.id, "closed", detail="the channel is closed")

    async def retire(self) -> None:
        """Close the channel as soon as the calls that run have ended, a day later at most; at once on cancellation."""
        try:
            await self._channel.close(RETIRE_S)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the channel; calls that still run fail."""
        self.partings.cut()
        await self._channel.close()


class Partings:
    """Calls that have said all they had to say, and that their workers may end by themselves."""

    def __init__(self) -> None:
        self._timers: dict[aio.UnaryStreamCall[Request, bytes], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, call: "aio.UnaryStreamCall[Request, bytes]") -> None:
        """Give a call a second."""
        if not call.done():
            self._timers[call] = asyncio.get_running_loop().call_later(PARTING_S, self._end, call)
            call.add_done_callback(self._end)

    def _end(self, call: "aio.UnaryStreamCall[Request, bytes]") -> None:
        timer = self._timers.pop(call, None)
        if timer is not None:
            timer.cancel()
            call.cancel()

    def cut(self) -> None:
        """End all of them."""
        for call in tuple(self._timers):
            self._end(call)


class Call:
    """One server-streaming call. Its owner ends it by `part` or by `cancel`, whatever happened."""

    def __init__(self, instance: Instance, call: "aio.UnaryStreamCall[Request, bytes]", partings: Partings) -> None:
        self._instance = instance
        self._call = call
        self._partings = partings

    async def read(self) -> bytes | None:
        """The next message as it came; None where the worker has ended the call in order.

        Messages are fetched one by one, so a call that is not read slows the worker down.

        Raises:
            RequestError: the call failed.
        """
        try:
            message = await self._call.read()
        except aio.AioRpcError as error:
            raise _as_error(self._instance, error) from error
        except asyncio.CancelledError:
            if _leaving():
                raise
            detail = "the channel was closed"  # gRPC tells this as a cancellation, of the call and not of the task
            raise EngineFailed(side_of(self._instance), self._instance.id, "closed", detail=detail) from None
        return message if isinstance(message, bytes) else None

    def cancel(self) -> None:
        """End the call; the worker is told unless it has ended it already."""
        self._call.cancel()

    def part(self) -> None:
        """Let the worker end a call by itself that has said all it had to say, within a second."""
        self._partings.add(self._call)


def _leaving() -> bool:
    """Whether the task that runs is cancelled. No caller may hold that task: it keeps the error that it ends with."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _serialised(request: Request) -> bytes:
    return request()


def _as_error(instance: Instance, error: aio.AioRpcError) -> RequestError:
    return call_failed(instance, error.code().name, error.details() or "")


def _as_failure(instance: Instance, error: aio.AioRpcError) -> EngineFailed:
    """The same for a health check, where everything that is wrong is the worker's fault."""
    told = _as_error(instance, error)
    if isinstance(told, EngineFailed):
        return told
    detail = f"{error.code().name}: {error.details()}"
    return EngineFailed(side_of(instance), instance.id, "engine_error", detail=detail)


def _channel_options(settings: ChannelSettings, connect_s: float) -> list[tuple[str, int | str]]:
    connect_ms = LONGEST_CONNECT_MS if math.isinf(connect_s) else int(connect_s * 1000)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", settings.receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", FIRST_WAIT_MS),
        ("grpc.min_reconnect_backoff_ms", connect_ms),  # by its effect: how long one try may take
        ("grpc.max_reconnect_backoff_ms", max(FIRST_WAIT_MS, int(settings.reconnect_s * 1000))),
    ]
    if settings.keepalive_s:
        options += [
            ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
            ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout_s * 1000)),  # what counts, of the two
            ("grpc.keepalive_permit_without_calls", int(settings.keepalive_idle)),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if settings.tls.server_name:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    return options


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    ca, key, chain = (Path(name).read_bytes() if name else None for name in (tls.ca_file, tls.key_file, tls.cert_file))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=chain)
