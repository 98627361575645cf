"""The calls of the MindIE controller (MindIE protocol page §9.1-9.3): it pushes the list and asks for loads."""

import logging
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from coordinator.cluster import Cluster

from .building import Builder, Scheme
from .errors import Refused, json_reply
from .flex import DECODE_PART_ID, split_flex
from .instances import MakeInstance
from .loads import LoadReader, TrafficReader
from .refresh_body import MAX_INSTANCES, BadRefresh, Id, parse_refresh

SOURCE = "controller"
MAX_TASK_IDS = 100
MAX_ID_DIGITS = 20  # of a 64-bit number

log = logging.getLogger("pd_coordinator.management")
T = TypeVar("T")


class _Ids(msgspec.Struct):
    ids: list[Id]


class _Query(msgspec.Struct):
    p_id: Id
    d_id: Id
    role_change_type: Literal[0, 1]


class _Backup(msgspec.Struct):
    is_master: bool
    is_abnormal: bool


class Controller:
    """Handlers of the controller's calls.

    Args:
        make_instance: builds an instance from the keys of the configuration file.
        scheme: http or https, how engines are called; the controller does not say.

    Attributes:
        skipped: members of refreshes that were left out so far, each time counted.
    """

    def __init__(
        self,
        cluster: Cluster,
        make_instance: MakeInstance,
        loads: LoadReader,
        traffic: TrafficReader,
        *,
        scheme: Scheme = "http",
    ) -> None:
        self._cluster = cluster
        self._builder = Builder(make_instance, scheme)
        self._loads = loads
        self._traffic = traffic
        self._initialised = False
        self._flex_id: int | None = None
        self._faults: dict[int, str] = {}
        self.skipped = 0

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part; they must stand before `/v1/instances/{id}`."""
        return [
            web.post("/v1/instances/refresh", self.refresh),
            web.post("/v1/instances/offline", self.offline),
            web.post("/v1/instances/online", self.online),
            web.get("/v1/instances/tasks", self.tasks),
            web.post("/v1/instances/query_tasks", self.query_tasks),
            web.get("/v1/coordinator_info", self.coordinator_info),
            web.get("/recvs_info", self.recvs_info),
            web.post("/backup_info", self.backup_info),
        ]

    # --- the list

    async def refresh(self, request: web.Request) -> web.Response:
        """Take over the full list: 200 without a body, or 400 if it cannot be used at all."""
        try:
            self.take(await request.read())
        except BadRefresh as error:
            raise Refused(400, str(error)) from None
        return web.Response()

    def take(self, body: bytes) -> None:
        """Make the cluster's members of this source what a refresh says; raises BadRefresh.

        A known id without a usable description stays as it is; an unknown one is left out, logged when its reason is
        another one than before, and counted.
        """
        picture = parse_refresh(body)
        split = split_flex(picture.entries)
        instances, faults = self._builder.build(split.entries)
        faults.update(picture.skipped)
        described = {entry.id for entry in picture.entries} - faults.keys()
        for ident, instance in self._cluster.instances(SOURCE).items():
            origin = self._origin(int(ident))
            if origin in picture.ids and origin not in described:
                instances[ident] = instance
        changes = self._cluster.replace(SOURCE, list(instances.values()))
        self._flex_id = split.flex_id if self._flex_id not in picture.ids - described else self._flex_id
        self._initialised = self._initialised or not picture.empty
        self._report(faults | {int(ident): reason for ident, reason in changes.refused.items()})

    def _origin(self, ident: int) -> int:
        """The id under which the controller knows an instance of ours."""
        return self._flex_id if ident == DECODE_PART_ID and self._flex_id is not None else ident

    def _parts(self, ident: int) -> tuple[str, ...]:
        """Our ids of an instance of the controller's."""
        return (str(ident), str(DECODE_PART_ID)) if ident == self._flex_id else (str(ident),)

    def _report(self, faults: dict[int, str]) -> None:
        self.skipped += len(faults)
        for ident, reason in faults.items():
            if self._faults.get(ident) != reason:
                log.warning("instance %d of the controller's list is left out: %s", ident, reason)
        self._faults = faults

    # --- other calls

    async def offline(self, request: web.Request) -> web.Response:
        """Give these no new requests; those that run go on."""
        return await self._hold(request, offline=True)

    async def online(self, request: web.Request) -> web.Response:
        """Undo `offline`."""
        return await self._hold(request, offline=False)

    async def _hold(self, request: web.Request, *, offline: bool) -> web.Response:
        self._need_list()
        ids = (await _body(request, _Ids)).ids
        if len(ids) > MAX_INSTANCES:
            raise Refused(400, f"ids holds {len(ids)} members, at most {MAX_INSTANCES} are allowed")
        self._cluster.set_offline([part for ident in ids for part in self._parts(ident)], offline=offline)
        return web.Response()

    async def tasks(self, request: web.Request) -> web.Response:
        """Number of requests that need each of the `id`s of the query, in their order; -1 for an unknown one."""
        if len(request.query) > MAX_TASK_IDS:
            raise Refused(400, f"at most {MAX_TASK_IDS} ids can be asked for at once")
        known = {instance.id for instance, _ in self._cluster.states()}
        return json_reply({"tasks": [self._running(text, known) for text in request.query.getall("id", [])]})

    def _running(self, text: str, known: set[str]) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS):
            return -1
        parts = [part for part in self._parts(int(text)) if part in known]
        return sum(map(self._loads.running, parts)) if parts else -1

    async def query_tasks(self, request: web.Request) -> web.Response:
        """Whether a pair has no common request any more, so that one of the two may change its role."""
        query = await _body(request, _Query)
        decode = DECODE_PART_ID if query.d_id == self._flex_id else query.d_id
        return json_reply({"is_end": self._loads.pair_running(str(query.p_id), str(decode)) == 0})

    async def coordinator_info(self, _request: web.Request) -> web.Response:
        """What was placed on each instance, and how long prompts and answers were lately."""
        self._need_list()
        prompt, output = self._traffic.lengths()
        rows = self._schedule_info(map(int, self._cluster.instances(SOURCE)))
        info: dict[str, object] = {"schedule_info": rows}
        if rows:
            info["request_num"] = self._loads.live()
        info["request_length_info"] = {"input_len": prompt, "output_len": output}
        return json_reply(info)

    def _schedule_info(self, ids: Iterable[int]) -> list[dict[str, int]]:
        rows: dict[int, dict[str, int]] = {}
        for ident in ids:
            origin = self._origin(ident)
            row = rows.setdefault(origin, {"id": origin, "allocated_slots": 0, "allocated_blocks": 0})
            slots, blocks = self._loads.allocated(str(ident))
            row["allocated_slots"] += slots
            row["allocated_blocks"] += blocks
        return list(rows.values())

    async def recvs_info(self, _request: web.Request) -> web.Response:
        """Requests since the last call. There is no second coordinator, so this one is the master."""
        return json_reply({"is_master": True, "recv_flow": self._traffic.arrivals()})

    async def backup_info(self, request: web.Request) -> web.Response:
        """Take note of the other coordinator's condition, which changes nothing for a single one."""
        self._need_list()
        try:
            await _body(request, _Backup)
        except Refused:
            return json_reply({"update_successfully": False}, 400)
        return json_reply({"update_successfully": True})

    def _need_list(self) -> None:
        if not self._initialised:
            raise Refused(503, "no list of instances has come from the controller yet")


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except msgspec.DecodeError as error:
        raise Refused(400, f"the body cannot be used: {error}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
