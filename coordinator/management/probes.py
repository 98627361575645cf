"""Probes for Kubernetes, load balancers and Triton clients: the status for machines, a JSON body for people."""

from aiohttp import web

from coordinator.cluster import Cluster

from .errors import json_reply


class Probes:
    """Started, alive, ready.

    Alive means the process; ready means that a request could be placed: at least one pair of prefill and decode
    instances, or a hybrid one (MindIE protocol page §9.4, and a JSON body that says why).

    Attributes:
        serving: whether the data plane listens; before that it has not started and is not ready.
        draining: set once the process is to end; it is alive then, and no longer ready.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.serving = True
        self.draining = False

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part."""
        return [
            web.get("/v1/startup", self.started),
            web.get("/v1/health", self.alive),
            web.get("/v2/health/live", self.alive),
            web.get("/v1/readiness", self.ready),
            web.get("/v2/health/ready", self.ready),
            web.get("/v2/models/{model:.+}/versions/{version}/ready", self.model_ready),
            web.get("/v2/models/{model:.+}/ready", self.model_ready),
        ]

    async def started(self, _request: web.Request) -> web.Response:
        """200 once the data plane listens, else 503."""
        return json_reply({"status": "started"}) if self.serving else json_reply({"status": "starting"}, 503)

    async def alive(self, _request: web.Request) -> web.Response:
        """200 as long as the process answers."""
        return json_reply({"status": "draining" if self.draining else "alive"})

    async def ready(self, _request: web.Request) -> web.Response:
        """200 if a request could be placed, else 503."""
        return self._ready(None)

    async def model_ready(self, request: web.Request) -> web.Response:
        """200 if a request for this model could be placed, else 503."""
        return self._ready(request.match_info["model"])

    def _ready(self, model: str | None) -> web.Response:
        if self.draining:
            return json_reply({"ready": False, "reason": "the coordinator is shutting down"}, 503)
        if not self.serving:
            return json_reply({"ready": False, "reason": "the data plane does not listen yet"}, 503)
        if not self._cluster.accepts(model):
            return json_reply({"ready": False, "reason": f"no instance serves the model {model!r}"}, 503)
        found, reason = self._cluster.ready_pair(model)
        return json_reply({"ready": found, "reason": reason}, 200 if found else 503)
