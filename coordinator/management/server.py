"""The other port: it listens, and puts the parts of the management plane together."""

import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from coordinator.cluster import Cluster

from .controller import Controller
from .errors import Refused, errors_as_json
from .instances import InstancesApi, MakeInstance
from .page import PATH as PAGE
from .probes import Probes
from .screen import Screen
from .site import Site

POLLED = (
    "/v1/instances/refresh",
    "/v1/instances/query_tasks",
    "/backup_info",
)  # by the MindIE controller, all the time
BODY_LIMIT_BYTES = 32 * 1024 * 1024
KEEP_ALIVE_S = 75.0
SHUTDOWN_S = 1.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricsText = Callable[[], str | bytes | Awaitable[str | bytes]]


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen; port 0 takes any free one.

    Attributes:
        metrics_port: set: `/metrics` is served there and not on `port`.
        status_port: set: probes are served there too.
    """

    host: str = "127.0.0.1"
    port: int = 1026
    metrics_port: int | None = None
    status_port: int | None = None


class Management:
    """The management plane: instances, probes, metrics, and the MindIE controller's calls.

    It may start before the data plane listens; `serving` tells the probes then, since readiness speaks for both.

    Args:
        make_instance: builds an instance from the keys of the configuration file; raises ValueError.
        metrics: the text for `/metrics`.
        controller: the MindIE controller's calls; None: they are not served.
        extra: more routes for this port, a web page for instance.

    Attributes:
        addresses: where it listens, once started: `management`, and `metrics` and `status` where set.
        screen: says who may call; everybody, unless it is given keys.
        tls: set before the start: all its ports speak TLS, and nothing else.
        engine_metrics: gives the text for `/metrics/engines`; None: instances are not asked.
    """

    def __init__(
        self,
        listen: Listen,
        cluster: Cluster,
        *,
        make_instance: MakeInstance,
        metrics: MetricsText,
        controller: Controller | None = None,
        extra: Sequence[web.AbstractRouteDef] = (),
    ) -> None:
        self._listen = listen
        self._metrics = metrics
        self.engine_metrics: Callable[[], bytes | None] = lambda: None
        self._probes = Probes(cluster)
        self.tls: ssl.SSLContext | None = None
        self.screen = Screen([PAGE, *(route.path for route in self._probes.routes())], POLLED)
        self._runners: list[web.AppRunner] = []
        self.addresses: dict[str, tuple[str, int]] = {}
        metrics_routes = [
            web.get("/metrics", self._serve_metrics),
            web.get("/metrics/engines", self._serve_engine_metrics),
        ]
        first: list[web.AbstractRouteDef] = [*(controller.routes() if controller is not None else ()), *extra]
        first += [*InstancesApi(cluster, make_instance).routes(), *self._probes.routes()]
        plan: list[tuple[str, int, Sequence[web.AbstractRouteDef]]] = []
        if listen.metrics_port is None:
            first += metrics_routes
        else:
            plan.append(("metrics", listen.metrics_port, metrics_routes))
        if listen.status_port is not None:
            plan.append(("status", listen.status_port, self._probes.routes()))
        self._plan = [("management", listen.port, first), *plan]

    @property
    def serving(self) -> bool:
        """Whether the data plane listens (true unless told otherwise); without it nothing is ready."""
        return self._probes.serving

    @serving.setter
    def serving(self, value: bool) -> None:
        self._probes.serving = value

    @property
    def draining(self) -> bool:
        """Whether the process is to end: it is no longer ready then, but alive."""
        return self._probes.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._probes.draining = value

    async def start(self) -> None:
        """Listen; raises OSError if a port cannot be had, with nothing left open."""
        try:
            for name, port, routes in self._plan:
                self.addresses[name] = await self._open(port, routes)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop listening; calls that are under way get a second."""
        while self._runners:
            await self._runners.pop().cleanup()
        self.addresses.clear()

    async def _open(self, port: int, routes: Sequence[web.AbstractRouteDef]) -> tuple[str, int]:
        app = web.Application(
            client_max_size=BODY_LIMIT_BYTES, middlewares=[self.screen.audit, errors_as_json, self.screen.admit]
        )
        app.add_routes(routes)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=False,
            keepalive_timeout=KEEP_ALIVE_S,
            shutdown_timeout=SHUTDOWN_S,
        )
        self._runners.append(runner)
        await runner.setup()
        await Site(runner, self._listen.host, port, self.tls).start()
        host, bound = runner.addresses[0][:2]
        return host, bound

    async def _serve_metrics(self, _request: web.Request) -> web.Response:
        text = self._metrics()
        if isinstance(text, Awaitable):
            text = await text
        body = text.encode() if isinstance(text, str) else text
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def _serve_engine_metrics(self, _request: web.Request) -> web.Response:
        body = self.engine_metrics()
        if body is None:
            raise Refused(404, "metrics.engines.scrape is false: instances are not asked for their metrics")
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})
