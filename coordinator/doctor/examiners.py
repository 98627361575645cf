"""What each engine's instances tell about themselves, and how one sees that KV has moved."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from coordinator.core.abilities import Examiner, Identity, Verdict
from coordinator.core.instance import Instance
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError

_OK = 200
_SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_LOOK_AT = "see the KV transfer lines in the logs of both instances"


class Plain:
    """Examiner of engines that tell no more than an OpenAI list of models, and the base of the others.

    Args:
        moved: whether the protocol itself leaves decode no other way than to go on with prefill's KV.
        why: how it does.
    """

    def __init__(self, client: HttpClient, *, moved: bool | None = None, why: str = "") -> None:
        self._client = client
        self._verdict = Verdict(moved, why or "this engine tells nothing of its KV")

    async def identify(self, instance: Instance, within_s: float) -> Identity:
        """See core.abilities.Examiner."""
        return Identity(models=await self._models(instance, within_s))

    async def take_stock(self, decode: Instance, within_s: float) -> Mapping[str, float]:  # noqa: ARG002
        """See core.abilities.Examiner."""
        return {}

    def judge(self, before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:  # noqa: ARG002
        """See core.abilities.Examiner."""
        return self._verdict

    async def _models(self, instance: Instance, within_s: float) -> tuple[str, ...]:
        listed = (await self._json(instance, "/v1/models", within_s)).get("data")
        rows = listed if isinstance(listed, list) else []
        names = (row.get("id") for row in rows if isinstance(row, dict))
        return tuple(name for name in names if isinstance(name, str))

    async def _json(self, instance: Instance, path: str, within_s: float) -> dict[str, Any]:
        """An object that the instance answers; empty where it does not."""
        try:
            found = msgspec.json.decode(await self._page(instance, path, within_s))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _page(self, instance: Instance, path: str, within_s: float) -> bytes:
        deadline_s = time.monotonic() + within_s
        try:
            reply = await self._client.fetch(instance.address, b"GET", path, (), deadline_s=deadline_s)
        except TransportError:
            return b""
        return reply.body if reply.status == _OK else b""


class Silent(Plain):
    """Examiner of engines that speak no HTTP."""

    async def identify(self, instance: Instance, within_s: float) -> Identity:  # noqa: ARG002
        """See core.abilities.Examiner."""
        return Identity()


class Vllm(Plain):
    """vLLM: its version, and the counters of KV transfers on decode's metrics page."""

    TRANSFERRED = ("external_kv_transfer", "vllm:external_prefix_cache_hits_total", "vllm:nixl_xfer_time_seconds_count")
    COMPUTED = "local_compute"
    FAILED = "vllm:nixl_num_failed_transfers_total"

    async def identify(self, instance: Instance, within_s: float) -> Identity:
        """Its models and version; vLLM tells no role."""
        version = (await self._json(instance, "/version", within_s)).get("version")
        return Identity(None, await self._models(instance, within_s), version if isinstance(version, str) else None)

    async def take_stock(self, decode: Instance, within_s: float) -> Mapping[str, float]:
        """The counters, by name or by the source of prompt tokens."""
        page = (await self._page(decode, "/metrics", within_s)).decode("utf-8", "replace")
        wanted = {*self.TRANSFERRED, self.COMPUTED, self.FAILED}
        return {name: value for name, value in _sums(page, "source").items() if name in wanted}

    def judge(self, before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:
        """By what has grown."""
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        moved = [name for name in self.TRANSFERRED if grown.get(name, 0) > 0]
        if moved:
            return Verdict(moved=True, why=f"its metrics count it ({moved[0]} +{grown[moved[0]]:g})")
        if not any(name in after for name in self.TRANSFERRED):
            return Verdict(moved=None, why="its metrics have no counters of KV transfers")
        computed = grown.get(self.COMPUTED, 0)
        why = f"it computed {computed:g} prompt tokens itself" if computed > 0 else "its metrics count no KV transfer"
        if grown.get(self.FAILED, 0) > 0:
            why += ", after a KV transfer had failed"
        return Verdict(
            moved=False,
            why=why,
            advice="do both instances run with --kv-transfer-config (NixlConnector, kv_role kv_producer on prefill and "
            "kv_consumer on decode), and can decode reach prefill's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and "
            "_PORT)? Also " + _LOOK_AT,
        )


class Sglang(Plain):
    """SGLang: `/get_server_info` tells role, model and version; in decode mode it cannot compute a prompt."""

    MODES: Mapping[object, str] = {"prefill": "prefill", "decode": "decode", "null": "hybrid"}
    DECODES = "decodes"

    async def identify(self, instance: Instance, within_s: float) -> Identity:
        """What that page says."""
        about = await self._about(instance, within_s)
        names = [about.get("served_model_name"), *await self._models(instance, within_s)]
        models = tuple(dict.fromkeys(name for name in names if isinstance(name, str)))
        version = about.get("version")
        role = self.MODES.get(about.get("disaggregation_mode"))
        return Identity(role, models, version if isinstance(version, str) else None)

    async def take_stock(self, decode: Instance, within_s: float) -> Mapping[str, float]:
        """Whether it is in decode mode."""
        mode = (await self._about(decode, within_s)).get("disaggregation_mode")
        return {} if mode is None else {self.DECODES: float(mode == "decode")}

    def judge(self, before: Mapping[str, float], after: Mapping[str, float]) -> Verdict:  # noqa: ARG002
        """By its mode."""
        if self.DECODES not in after:
            return Verdict(moved=None, why="it does not tell its mode")
        if after[self.DECODES]:
            return Verdict(moved=True, why="in decode mode it cannot compute a prompt itself")
        return Verdict(
            moved=False,
            why="it is not in decode mode, so it computed the prompt itself",
            advice="start it with --disaggregation-mode decode",
        )

    async def _about(self, instance: Instance, within_s: float) -> dict[str, Any]:
        found = await self._json(instance, "/get_server_info", within_s)
        return found or await self._json(instance, "/server_info", within_s)


class Mindie(Plain):
    """MindIE: `/v1/status` tells the role where it is on this port (MindIE protocol page §9.5)."""

    async def identify(self, instance: Instance, within_s: float) -> Identity:
        """What status, models and `/info` say."""
        service = (await self._json(instance, "/v1/status", within_s)).get("service")
        role = service.get("currentRole") if isinstance(service, dict) else None
        version = (await self._json(instance, "/info", within_s)).get("version")
        return Identity(
            role if role in ("prefill", "decode") else None,
            await self._models(instance, within_s),
            version if isinstance(version, str) else None,
        )


class Makes(Protocol):
    """Makes an examiner."""

    def __call__(self, client: HttpClient, /) -> Examiner:
        """Make it."""
        ...


_BUILT_IN: Mapping[str, Makes] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "mindie": lambda client: Mindie(
        client, moved=True, why="its output came on its result stream, and it gave nothing back"
    ),
    "microserving": lambda client: Plain(
        client, moved=True, why="prefill has confirmed that it wrote into the room that decode had reserved"
    ),
    "xllm": lambda client: Plain(
        client, moved=True, why="prefill has handed the request on, and decode waits for nothing else"
    ),
    "disaggpb": lambda client: Silent(client, moved=True, why="the KV went through the coordinator"),
}


def examiner_of(name: str, engine: object, client: HttpClient) -> Examiner:
    """Who examines the instances of an engine: itself, somebody of the table, or one that knows no more than models."""
    if isinstance(engine, Examiner):
        return engine
    makes = _BUILT_IN.get(name)
    return Plain(client) if makes is None else makes(client)


def _sums(page: str, label: str) -> dict[str, float]:
    """Each series of a metrics page, summed over its labels; where it has `label`, by the value of that."""
    sums: dict[str, float] = {}
    for name, value in _samples(page, label):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _samples(page: str, label: str) -> Iterable[tuple[str, float]]:
    for name, labels, text in _SERIES.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        yield dict(_LABEL.findall(labels)).get(label, name), value
