"""The coordinator's place in etcd, and who else has one (xLLM protocol page §5.1)."""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Mapping
from itertools import cycle
from typing import Protocol

from coordinator.core.instance import Address
from coordinator.engines.xllm.info import address_of
from coordinator.engines.xllm.settings import XllmSettings
from coordinator.transport.client import HttpClient
from coordinator.transport.etcd import Compacted, EtcdClient, EtcdError, Event, Watch

PING = b"XLLM_PING"
SERVICE = b"XLLM:SERVICE:"
MASTER = b"XLLM:SERVICE:MASTER"
FIRST, BEHIND_LAST = b"XLLM:DECODE:", b"XLLM:SERVICE;"  # instances of every type, and services
BEATS_PER_LEASE = 3
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
LAST_WORD_S = 1.0


class Listener(Protocol):
    """Who wants to know what is written in etcd. Keys are without the namespace."""

    def listed(self, entries: Mapping[bytes, bytes]) -> None:
        """These are all keys."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """A key was written."""
        ...

    def deleted(self, key: bytes, before: bytes) -> None:
        """A key is gone; `before`: what it held, empty where that is not known."""
        ...

    def mastered(self, *, master: bool) -> None:
        """Whether instances send their heartbeats to us."""
        ...


class Presence:
    """Registers the coordinator, keeps its lease, and follows the keys.

    While etcd is away, everything stays as it was last known; once it is back, all is registered and read again.

    Args:
        service: our `ip:port`.
    """

    def __init__(
        self, settings: XllmSettings, service: str, client: HttpClient, listener: Listener, log: logging.Logger
    ) -> None:
        self._settings = settings
        self._service = service.encode()
        self._client = client
        self._listener = listener
        self._log = log
        self._prefix = f"/{settings.etcd_namespace}/".encode() if settings.etcd_namespace else b""
        self._task: asyncio.Task[None] | None = None
        self._master = False
        self._master_free = True  # nobody else is known to be master
        self._lease: tuple[EtcdClient, int] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="xLLM etcd presence")

    async def aclose(self) -> None:
        """Give our keys back, within a second, and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._lease is not None:
            client, lease = self._lease
            self._lease = None
            with contextlib.suppress(EtcdError, TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await client.revoke(lease)

    # --- sessions

    async def _keep(self) -> None:
        pause_s, away = FIRST_PAUSE_S, False
        for endpoint in cycle(self._settings.etcd_endpoints):
            reached = asyncio.Event()
            try:
                await self._session(endpoint_of(endpoint), reached, away=away)
            except Compacted:
                continue
            except EtcdError as error:
                if reached.is_set() or not away:
                    self._log.warning("etcd is lost, instances stay as they are known: %s", error)
                away = True
            if reached.is_set():
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311  # jitter, no secret
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _session(self, address: Address, reached: asyncio.Event, *, away: bool) -> None:
        """Register, read, follow; ends with EtcdError."""
        settings = self._settings
        client = EtcdClient(self._client, address, settings.lease_ttl_s)
        if settings.etcd_login is not None:
            await client.log_in(*settings.etcd_login)
        await client.put(self._prefix + PING, b"PING")
        lease = await self._leased(client)
        registered = await self._register(client, lease)
        listing = await client.list(self._prefix + FIRST, self._prefix + BEHIND_LAST)
        self._take_all(listing.entries)
        self._master_free |= self._master  # the key may go with the lease of an earlier life of ours
        await self._campaign(client, lease)
        reached.set()
        if away:
            self._log.info("etcd is back")
        watch = await client.watch(
            self._prefix + FIRST, self._prefix + BEHIND_LAST, listing.revision + 1, self._changed
        )
        try:
            await self._follow(client, lease, watch, registered=registered)
        finally:
            watch.close()

    async def _follow(self, client: EtcdClient, lease: int, watch: Watch, *, registered: bool) -> None:
        beat_s = self._settings.lease_ttl_s / BEATS_PER_LEASE
        while True:
            await asyncio.wait([watch.ended], timeout=beat_s)
            if watch.ended.done():
                watch.ended.result()
            if not await client.keep_alive(lease):
                raise EtcdError("our lease has ended")
            registered = registered or await self._register(client, lease)
            await self._campaign(client, lease)

    async def _leased(self, client: EtcdClient) -> int:
        """Our lease: the one of the last session, if it has outlived that, for our keys hang on it."""
        if self._lease is not None and await client.keep_alive(self._lease[1]):
            lease = self._lease[1]
        else:
            lease = await client.grant(math.ceil(self._settings.lease_ttl_s))
        self._lease = (client, lease)
        return lease

    async def _register(self, client: EtcdClient, lease: int) -> bool:
        """Write our own key, or take it over from an earlier life of ours; False: somebody else's value is there."""
        return await client.hold(self._prefix + SERVICE + self._service, self._service, lease)

    async def _campaign(self, client: EtcdClient, lease: int) -> None:
        """Try to become master where there is none; whether we are, the watch tells.

        The answer here may be older than what the watch has told meanwhile.
        """
        if self._master_free:
            self._master_free = False
            await client.hold(self._prefix + MASTER, self._service, lease)

    # --- keys

    def _take_all(self, entries: Mapping[bytes, bytes]) -> None:
        size = len(self._prefix)
        found = {key[size:]: value for key, value in entries.items()}
        self._note_master(found.pop(MASTER, None))
        self._listener.listed({key: value for key, value in found.items() if not key.startswith(SERVICE)})

    def _changed(self, event: Event) -> None:
        key = event.kv.key[len(self._prefix) :]
        deleted = event.type == "DELETE"
        if key == MASTER:
            self._note_master(None if deleted else event.kv.value)
        elif key.startswith(SERVICE):
            return
        elif deleted:
            self._listener.deleted(key, event.prev_kv.value if event.prev_kv is not None else b"")
        else:
            self._listener.put(key, event.kv.value)

    def _note_master(self, holder: bytes | None) -> None:
        """Somebody is master, or nobody; we try to be at the next beat."""
        self._master_free = holder is None
        self._set_master(master=holder == self._service)

    def _set_master(self, *, master: bool) -> None:
        if master != self._master:
            self._master = master
            self._log.info("this coordinator is %s master of the xLLM instances", "now" if master else "no longer")
            self._listener.mastered(master=master)


def endpoint_of(endpoint: str) -> Address:
    """An endpoint of the configuration: `host:port` or a URL."""
    scheme, _, rest = endpoint.rpartition("://")
    found = address_of(rest)
    return Address(found.host, found.port, tls=scheme == "https")
