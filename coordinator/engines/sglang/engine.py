"""The engine protocol `sglang`: which calls serve a request, and what is known of the instances."""

import time
from collections.abc import Generator, Mapping

from msgspec.structs import replace

from coordinator.core.errors import BadRequest
from coordinator.core.instance import Instance, Role
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Answer, Outcome, Placement, Watcher
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.headers import engine_headers
from coordinator.engines.health import alive, takes_key, told_model
from coordinator.engines.plain_call import serve_alone
from coordinator.engines.port_options import port_options
from coordinator.engines.sglang.bootstrap import KEY, BootstrapPorts, Tell
from coordinator.engines.sglang.drains import Drains
from coordinator.engines.sglang.joined import JoinedOut, LogprobsOut
from coordinator.engines.sglang.pair import Call, Pair, StaleConnection
from coordinator.steps import in_steps
from coordinator.transport.request import HeaderBlock
from coordinator.wire.events import wants_usage
from coordinator.wire.json_edit import NO_LISTS, Fields, IndexedRequest, Lists, long_lists, request_fields
from coordinator.wire.sglang import (
    MAX_SEQUENCES,
    TooManySequences,
    asks_logprobs,
    batch_field,
    room_of,
    sequences_of,
    with_rooms,
    without_control,
)

NATIVE = "sglang"  # the API family of SGLang's own /generate
SPOKEN = ("openai", NATIVE)
HEALTH_PATH = "/health"
MODELS_EVERY_S = 30.0
OPTIONS = (KEY,)
STALE_TRIES = 2
ROOMS_AT_ONCE = 256
KEEP_BYTES = 64 << 10
KEEP_LOGPROBS_BYTES = 16 << 20


class SglangEngine:
    """Engine protocol `sglang`: implements core.ports.EngineProtocol."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._client = context.client
        self._ids = context.ids
        self._ports = BootstrapPorts(context.client)
        self._drains = Drains()
        self._models: dict[object, tuple[str | None, float]] = {}  # the name, and until when it is taken for granted

    # --- instances

    @staticmethod
    def options(given: Mapping[str, object]) -> Mapping[str, object]:
        """Validate `bootstrap_port`, the one key of this engine's instances."""
        return port_options(given, OPTIONS)

    def attach(self, instance: Instance, watcher: Watcher) -> None:  # noqa: ARG002
        """Nothing stands open between requests."""
        watcher.linked()

    async def detach(self, instance: Instance) -> None:
        """Forget the instance and close idle connections."""
        self._ports.forget(instance)
        self._models.pop(instance.key, None)
        self._client.close_address(instance.address)

    async def probe(self, instance: Instance) -> str | None:
        """Alive is whoever answers `/health` without a 5xx; then the bootstrap port and the model's name are asked for.

        Neither of these makes an instance ill, unless it refuses a key of ours.
        """
        deadline_s = time.monotonic() + self._context.health_timeout_s
        model = self._models.pop(instance.key, None)  # not to be relied on after a failed check
        await alive(self._client, instance, self._context.health_path or HEALTH_PATH, deadline_s)
        if instance.role is Role.PREFILL:
            await self._ports.ask(instance, deadline_s)
        if instance.model is None and (model is None or model[1] <= time.monotonic()):
            model = (await told_model(self._client, instance, deadline_s), time.monotonic() + MODELS_EVERY_S)
        elif instance.model is not None:
            await takes_key(self._client, instance, deadline_s)
        if model is None:
            return None
        self._models[instance.key] = model
        return model[0]

    # --- over several processes (core.ports.SplitEngine)

    def own(self, tell: Tell) -> None:
        """Become the half that makes the health checks, and so learns bootstrap ports."""
        self._ports.own(tell)

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started the bootstrap ports."""
        self._ports.introduce(worker)

    def follow(self) -> None:
        """Become a half that serves requests; it is told all it needs."""

    def told(self, data: bytes) -> None:
        """Take a message of the half that makes the health checks."""
        self._ports.told(data)

    # --- requests

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt: the same request to prefill and decode at once, decode's answer to the client.

        Raises:
            RequestError: see core.errors; EngineFailed names the guilty side.

        Cancelled, both connections are closed, which is how SGLang learns of it.
        """
        fields = _fields_of(request)
        if placement.prefill.address == placement.decode.address:
            return await self._serve_whole(request, placement, fields, out)
        tries_left = STALE_TRIES
        while True:
            try:
                await self._attempt(request, placement, fields, out)
            except StaleConnection as stale:
                if not tries_left or out.started:
                    raise stale.taken() from stale
                tries_left -= 1
            else:
                return COMPLETED

    async def _attempt(self, request: Request, placement: Placement, fields: Fields, out: Out) -> None:
        native, stream = request.api == NATIVE, request.ask.stream
        listed = await _listed(request, fields) if isinstance(request, IndexedRequest) else NO_LISTS
        try:
            count = sequences_of(fields, listed, native=native)
        except TooManySequences as error:
            raise BadRequest(str(error)) from error
        rooms = [room_of(int(self._ids.next()))] if count is None else await in_steps(self._rooms(count))
        prefill = placement.prefill
        body = with_rooms(fields, prefill.address.host, self._ports.of(prefill), rooms, batch=count is not None)
        wire_id = str(rooms[0])
        placement.prefill_sent(wire_id)
        call = Call(request.target, HeaderBlock(engine_headers(request, wire_id)), body, stream)
        joined: JoinedOut | None = None
        keep_bytes = KEEP_BYTES
        if native and asks_logprobs(fields):
            joined, keep_bytes = LogprobsOut(out, stream=stream), KEEP_LOGPROBS_BYTES
        elif not native and (not stream or wants_usage(fields.get("stream_options"))):
            joined = JoinedOut(out, stream=stream)
        await Pair(call, placement, out, joined, keep_bytes=keep_bytes).run(self._client, self._drains)

    def _rooms(self, count: int) -> Generator[None, None, list[int]]:
        """The rooms of a batch, which may take 15 ms, in steps."""
        rooms: list[int] = []
        while len(rooms) < count:
            rooms += [room_of(int(self._ids.next())) for _ in range(min(ROOMS_AT_ONCE, count - len(rooms)))]
            yield
        return rooms

    async def _serve_whole(self, request: Request, placement: Placement, fields: Fields, out: Out) -> Outcome:
        """One instance does both, without the fields that would tie it to another one."""
        body = without_control(fields)
        if body is not None:
            request = replace(request, body=body)
        return await serve_alone(self._context, request, placement, placement.prefill, out)

    async def call(self, request: Request, instance: Instance) -> Answer:  # noqa: ARG002
        """SGLang has none of the calls that are no inference; raises BadRequest."""
        raise _unspoken(request)

    async def aclose(self) -> None:
        """Close what is still being drained."""
        self._drains.close()


async def _listed(request: IndexedRequest, fields: Fields) -> Lists:
    """The prompts of a long body, if they are many."""
    name = batch_field(fields, native=request.api == NATIVE)
    return NO_LISTS if name is None else await in_steps(long_lists(request, (name,), MAX_SEQUENCES + 1))


def _fields_of(request: Request) -> Fields:
    if request.api not in SPOKEN:
        raise _unspoken(request)
    try:
        return request_fields(request)
    except ValueError as error:
        raise BadRequest("the body must be a JSON object", detail=str(error)) from error


def _unspoken(request: Request) -> BadRequest:
    return BadRequest(
        f"{request.path} is not served by SGLang engines; use /v1/chat/completions, /v1/completions, or /generate with "
        "`text`, `input_ids` or `input_embeds`"
    )
