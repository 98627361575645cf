"""The same methods over HTTP/1.1, and the REST paths (xLLM protocol page §2, §5.4)."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message

from instances.faults import Chosen
from instances.front import CHOSEN
from instances.xllm.errors import EREQUEST, RpcError, code_of
from instances.xllm.proto.engine_pb2 import ChatRequest, CompletionRequest
from instances.xllm.services import API, INFERENCE, PD

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_JSON, _PROTO = "application/json", "application/proto"
_FULL = {name.rpartition(".")[2]: name for name in (API, PD)}


def is_inference(path: str) -> bool:
    """Whether a path is that of an inference request."""
    service, _, method = path.removeprefix("/").partition("/")
    return path in (CHAT, COMPLETIONS) or (_FULL.get(service, service) == API and method in INFERENCE)


def error(status: int, code: int, text: str) -> web.Response:
    """An error as brpc gives it: text, and the code in a header."""
    return web.Response(status=status, text=text, headers={"x-bd-error-code": str(code)})


def known(given: Any, kind: Descriptor) -> Any:
    """A JSON object without the keys that the message has not: only snake_case names are fields."""
    if not isinstance(given, Mapping) or kind.full_name.startswith("google.protobuf."):
        return given
    kept: dict[str, Any] = {}
    for name, value in given.items():
        field = kind.fields_by_name.get(name)
        if field is None:
            continue
        inner = field.message_type
        if inner is None:
            kept[name] = value
        elif isinstance(value, list):
            kept[name] = [known(item, inner) for item in value]
        else:
            kept[name] = known(value, inner)
    return kept


class Http:
    """The HTTP side of one instance."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._instance = engine.instance

    def routes(self) -> list[web.RouteDef]:
        """All paths."""
        calls = [
            web.post(f"/{service}/{{method}}", self._call)
            for service in (*_FULL, *_FULL.values())
        ]  # fmt: skip
        return [
            *calls,
            web.post(CHAT, self._rest),
            web.post(COMPLETIONS, self._rest),
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/sim/kv/push", self._engine.kv.push_call),
            web.post("/sim/kv/pull", self._engine.kv.pull_call),
        ]

    async def _call(self, request: web.Request) -> web.Response:
        service = request.path.split("/")[1]
        transport = request.transport
        port = transport.get_extra_info("sockname")[1] if transport is not None else self._instance.port
        try:
            method = self._engine.services.find(_FULL.get(service, service), request.match_info["method"], port)
            message = await _read(request, method.request)
            reply = await method.run(message, request.get(CHOSEN, Chosen()))
        except RpcError as failed:
            return error(failed.status, failed.code, str(failed))
        if request.content_type == _PROTO:
            return web.Response(body=reply.SerializeToString(), content_type=_PROTO)
        body = MessageToJson(reply, preserving_proto_field_name=True, indent=None).encode()
        return web.Response(body=body, content_type=_JSON)

    async def _rest(self, request: web.Request) -> web.StreamResponse:
        """`/v1/*`: DEFAULT answers; of the others the answer goes to the service, only errors come back."""
        if self._engine.type == "DEFAULT":
            return await self._engine.plain.infer(request)
        kind = ChatRequest if request.path == CHAT else CompletionRequest
        try:
            message = await _read(request, kind)
            if not message.HasField("routing"):
                return error(400, EREQUEST, "No decode address provided to the prefill instance")
            method = self._engine.services.find(API, INFERENCE[kind is ChatRequest], self._instance.port)
            await method.run(message, request.get(CHOSEN, Chosen()))
        except RpcError as failed:
            return error(failed.status, failed.code, str(failed))
        return web.Response(content_type=_JSON)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK") if self._engine.presence.ready else error(503, code_of(503), "not ready")

    async def _models(self, _: web.Request) -> web.Response:
        name = self._instance.options.model
        card = {"id": name, "created": self._engine.created, "object": "model", "owned_by": "xllm"}
        return web.json_response({"object": "list", "data": [card]})


async def _read(request: web.Request, kind: type[Any]) -> Any:
    """The body as a message; raises RpcError."""
    body = await request.read()
    message: Message = kind()
    try:
        if request.content_type == _PROTO:
            return kind.FromString(body)
        if request.content_type != _JSON:
            raise RpcError(EREQUEST, f"content-type must be {_JSON} or {_PROTO}")
        given = json.loads(body) if body else {}
        if not isinstance(given, dict):
            raise RpcError(EREQUEST, "Fail to parse http body: not an object")
        return ParseDict(known(given, kind.DESCRIPTOR), message, ignore_unknown_fields=True)
    except (ParseError, DecodeError, ValueError, RecursionError) as wrong:
        raise RpcError(EREQUEST, f"Fail to parse http body: {wrong}") from None
