"""Control routes under `/sim/`: never on the paths of an engine."""

import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from instances.faults import BadFault

if TYPE_CHECKING:
    from instances.server import Instance


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(value, ensure_ascii=False).encode(), content_type="application/json"
    )


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() else default


class Control:
    """The control calls of one instance."""

    def __init__(self, instance: "Instance") -> None:
        self._instance = instance

    async def state(self, _: web.Request) -> web.Response:
        """`GET /sim/state`: KV counts, live requests, connections, faults, and what the engine adds."""
        instance = self._instance
        return _json(
            {
                "name": instance.name,
                "engine": instance.options.engine,
                "role": instance.role,
                "url": instance.url,
                "model": instance.options.model,
                "starting": instance.starting,
                "requests": instance.records.total,
                "inference_requests": instance.ordinal,
                "live_requests": instance.live,
                "connections": instance.connections,
                "faults": instance.faults.texts(),
                "kv": instance.ledger.snapshot(),
                **instance.engine.state(),
            }
        )

    async def requests(self, request: web.Request) -> web.Response:
        """`GET /sim/requests?last=N&path=/x`: the record, oldest first."""
        path = request.query.get("path")
        records = self._instance.records
        found = list(records) if path is None else records.of(path)
        last = _number(request, "last", 100)
        shown = found[max(0, len(found) - last) :]
        return _json({"total": records.total, "requests": [record.as_json() for record in shown]})

    async def faults(self, request: web.Request) -> web.Response:
        """`POST /sim/faults {"set":[...]}` or `{"add":[...]}`: takes effect with the next request."""
        try:
            given = json.loads(await request.read())
            chosen = {key: [str(text) for text in given[key]] for key in ("set", "add") if key in given}
            if not chosen or len(chosen) != len(given):
                raise BadFault('send {"set": [faults]} or {"add": [faults]}')
            if "set" in chosen:
                self._instance.faults.replace(chosen["set"])
            self._instance.faults.add(chosen.get("add", []))
        except (ValueError, TypeError) as bad:
            return _json({"error": str(bad)}, 400)
        return _json({"faults": self._instance.faults.texts()})

    async def menu(self, _: web.Request) -> web.Response:
        """`GET /sim/faults`: what is set and what can be."""
        faults = self._instance.faults
        return _json({"faults": faults.texts(), "menu": dict(faults.menu)})

    async def act(self, request: web.Request) -> web.Response:
        """`POST /sim/act {"do":"crash","value":"0.5"}`: something that happens on the spot."""
        try:
            given = json.loads(await request.read())
            name, value = str(given["do"]), str(given.get("value", ""))
            if name == "crash":
                self._instance.crash(float(value) if value else None)
            else:
                self._instance.engine.act(name, value)
        except (ValueError, TypeError, KeyError) as bad:
            return _json({"error": str(bad)}, 400)
        return _json({"done": name})

    async def reset(self, _: web.Request) -> web.Response:
        """`POST /sim/reset`: back to the start; connections stay."""
        self._instance.reset()
        return _json({"reset": True})


def routes(instance: "Instance") -> list[web.RouteDef]:
    """The control routes."""
    control = Control(instance)
    return [
        web.get("/sim/state", control.state),
        web.get("/sim/requests", control.requests),
        web.get("/sim/faults", control.menu),
        web.post("/sim/faults", control.faults),
        web.post("/sim/act", control.act),
        web.post("/sim/reset", control.reset),
    ]
