"""The instances API for operators and scripts (contract: `GET/POST /v1/instances` and what is below it)."""

from collections.abc import Callable, Mapping

from aiohttp import web

from coordinator.cluster import Cluster
from coordinator.core.instance import Instance

from .errors import Refused, json_reply, read_json
from .screen import ABOUT

SOURCE = "api"

MakeInstance = Callable[[Mapping[str, object]], Instance]
"""Builds an instance from the keys of the configuration file; raises ValueError with a sentence that names the key."""


class InstancesApi:
    """Handlers that show and change the members of the cluster."""

    def __init__(self, cluster: Cluster, make_instance: MakeInstance) -> None:
        self._cluster = cluster
        self._make = make_instance

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part."""
        return [
            web.get("/v1/instances", self.show),
            web.post("/v1/instances", self.add),
            web.delete("/v1/instances/{id}", self.remove),
            web.post("/v1/instances/{id}/drain", self.drain),
            web.post("/v1/instances/{id}/resume", self.resume),
        ]

    async def show(self, _request: web.Request) -> web.Response:
        """All instances, the draining ones included."""
        return json_reply({"instances": self._cluster.describe()})

    async def add(self, request: web.Request) -> web.Response:
        """Add one: 201 and its row; 400 for a faulty one, 409 if its id or place is taken."""
        given = await read_json(request)
        if not isinstance(given, dict):
            raise Refused(400, "the body must be a JSON object with the keys of one instance")
        try:
            instance = self._make(given)
        except ValueError as error:
            raise Refused(400, str(error)) from None
        request[ABOUT] = f"{instance.id} {instance.url}"
        try:
            self._cluster.add(instance, source=SOURCE)
        except ValueError as error:
            raise Refused(409, str(error)) from None
        return json_reply(self._row(instance.id), 201)

    async def remove(self, request: web.Request) -> web.Response:
        """Drain it, then remove it: 202, since its requests may go on for long."""
        return self._change(request, self._cluster.remove, 202)

    async def drain(self, request: web.Request) -> web.Response:
        """Take no more requests for it; those that run go on."""
        return self._change(request, self._cluster.drain, 200)

    async def resume(self, request: web.Request) -> web.Response:
        """Take requests for it again."""
        return self._change(request, self._cluster.resume, 200)

    def _change(self, request: web.Request, change: Callable[[str], None], status: int) -> web.Response:
        ident = request.match_info["id"]
        try:
            change(ident)
        except KeyError:
            raise Refused(404, f"there is no instance with the id {ident!r}") from None
        return json_reply(self._row(ident), status)

    def _row(self, ident: str) -> dict[str, object]:
        """Its row; without a state once it is gone."""
        rows = (row for row in self._cluster.describe() if row["id"] == ident)
        return next(rows, {"id": ident, "state": None})
