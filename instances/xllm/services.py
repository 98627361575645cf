"""The services of an instance: which methods there are, on which port, and what they do."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from instances.faults import Chosen
from instances.xllm.errors import EINTERNAL, ELOGOFF, ENOMETHOD, ENOSERVICE, RpcError
from instances.xllm.proto.engine_pb2 import (
    ChatRequest,
    CompletionRequest,
    DisaggGenerationsRequests,
    DisaggRequests,
    Empty,
    InstanceClusterInfo,
    ModelCard,
    ModelListRequest,
    ModelListResponse,
    PullSignal,
    Status,
)
from instances.xllm.vocabulary import from_wire, token_bytes

if TYPE_CHECKING:
    from instances.xllm.instance import XllmEngine

API, PD = "xllm.proto.XllmAPIService", "xllm.proto.DisaggPDService"
INFERENCE = ("Completions", "ChatCompletions")


@dataclass(frozen=True, slots=True)
class Method:
    """One method. `counted`: an inference request for fault selectors; `run`: takes the request and its faults."""

    request: type[Message]
    run: Callable[[Any, Chosen], Awaitable[Message]]
    counted: bool = False


class Services:
    """Both services of one instance."""

    def __init__(self, engine: "XllmEngine") -> None:
        self._engine = engine
        self._links_refused = 0
        self.unlinks = 0
        self._methods = {
            API: {
                "Completions": Method(CompletionRequest, self._infer, counted=True),
                "ChatCompletions": Method(ChatRequest, self._infer, counted=True),
                "Models": Method(ModelListRequest, self._models),
            },
            PD: {
                "AddNewRequests": Method(DisaggRequests, self._add, counted=True),
                "FirstGeneration": Method(DisaggGenerationsRequests, self._first),
                "MultiGenerations": Method(DisaggGenerationsRequests, self._fatal),
                "SendPullSignal": Method(PullSignal, self._fatal),
                "LinkInstance": Method(InstanceClusterInfo, self._link),
                "UnlinkInstance": Method(InstanceClusterInfo, self._unlink),
            },
        }

    def find(self, service: str, method: str, port: int) -> Method:
        """The method; raises RpcError for what that port does not serve."""
        here = API if port == self._engine.instance.port else PD
        if service != here:
            raise RpcError(ENOSERVICE, f"Fail to find service={service}")
        found = self._methods[service].get(method)
        if found is None:
            raise RpcError(ENOMETHOD, f"Fail to find method={service}.{method}")
        if not self._engine.presence.ready:
            raise RpcError(ELOGOFF, "Server is stopping or not started")
        return found

    @staticmethod
    def text(message: Message) -> str:
        """The prompt of a request, for markers of faults."""
        if isinstance(message, CompletionRequest):
            return message.prompt
        if isinstance(message, ChatRequest):
            return "\n".join(one.content for one in message.messages)
        if isinstance(message, DisaggRequests):
            ids = [token for request in message.reqs for token in request.prompt_tokens]
            return b"".join(token_bytes(from_wire(token)) for token in ids).decode("utf-8", "replace")
        return ""

    # --- XllmAPIService

    async def _infer(self, message: CompletionRequest | ChatRequest, chosen: Chosen) -> Message:
        self._engine.intake.accept(message, chosen)
        return Empty()

    async def _models(self, _: ModelListRequest, __: Chosen) -> Message:
        name = self._engine.instance.options.model
        card = ModelCard(id=name, created=self._engine.created, object="model", owned_by="xllm")
        return ModelListResponse(data=[card])

    # --- DisaggPDService

    async def _add(self, message: DisaggRequests, chosen: Chosen) -> Message:
        return self._engine.decode.add_new_requests(message, chosen)

    async def _first(self, message: DisaggGenerationsRequests, _: Chosen) -> Message:
        return Status(ok=await self._engine.decode.first_generation(message))

    async def _fatal(self, message: Message, _: Chosen) -> Message:
        self._engine.abort(f"{message.DESCRIPTOR.name} is for PD OOC mode only")
        raise RpcError(EINTERNAL, "the process died")

    async def _link(self, message: InstanceClusterInfo, _: Chosen) -> Message:
        engine = self._engine
        engine.links.asked += 1
        faults = engine.instance.faults.always()
        if "link_hang" in faults:
            await engine.instance.closing.wait()
        fails = faults.get("link_fails")
        if fails is not None and (not fails.value or self._links_refused < fails.number(0)):
            self._links_refused += 1
            engine.links.failed += 1
            return Status(ok=False)
        self._links_refused = 0 if fails is None else self._links_refused
        return Status(ok=engine.links.link(message.instance_name, message))

    async def _unlink(self, message: InstanceClusterInfo, _: Chosen) -> Message:
        self.unlinks += 1
        self._engine.decode.unlink(message.instance_name)
        return Status(ok=self._engine.links.unlink(message.instance_name))
