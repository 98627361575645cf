"""Requests and calls that one instance does alone: they go to it as they are, and so does its answer to the client."""

import time

from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Answer, Completed, Outcome, Placement, Stages
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import StreamLeg, check_whole, failed, refusal, run_stream
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.request import GivenHeaders

UNTYPED = "vllm"  # the API family whose streams are JSON documents without a content type


async def serve_alone(
    context: EngineContext, request: Request, placement: Placement, instance: Instance, out: Out
) -> Outcome:
    """Serve a request on one instance, on the client's own path.

    Raises:
        RequestError: see `relay_plain`.

    Cancellation closes the connection, which ends the request at the engine.
    """
    wire_id = context.ids.next()
    placement.prefill_sent(wire_id)
    return await relay_plain(context.client, request, engine_headers(request, wire_id), instance, placement, out)


async def relay_plain(
    client: HttpClient, request: Request, headers: GivenHeaders, instance: Instance, stages: Stages, out: Out
) -> Completed:
    """Send the client's own request to one instance and its answer back as it comes, byte for byte.

    Raises:
        RequestError: refusals, failures, and an answer that is not whole.
    """
    try:
        if request.ask.stream:
            leg = StreamLeg(instance, stages, out, untyped=request.api == UNTYPED)
            await run_stream(client, request, headers, leg)
        else:
            await _relay_whole(client, request, headers, instance, stages, out)
    except TransportError as error:
        raise failed(instance, error) from error
    return COMPLETED


async def _relay_whole(
    client: HttpClient, request: Request, headers: GivenHeaders, instance: Instance, stages: Stages, out: Out
) -> None:
    reply = await client.fetch(
        instance.address, b"POST", request.target, headers, request.body, deadline_s=request.deadlines.finished_s
    )
    now_s = time.monotonic()
    if reply.status != 200:
        raise refusal(instance, reply.status, reply.headers, reply.body)
    check_whole(instance, reply.body)
    stages.prefilled(now_s)
    stages.decoding(now_s)
    out.whole(reply.body, now_s, reply.header(b"content-type") or b"application/json")


async def pass_through(context: EngineContext, request: Request, instance: Instance) -> Answer:
    """Send a call that is no inference to an instance, on the client's own path, and return its answer.

    Raises:
        RequestError: EngineRefused for a 4xx, EngineFailed where there is no answer or another error.

    Cancellation closes the connection.
    """
    headers = engine_headers(request, context.ids.next())
    try:
        reply = await context.client.fetch(
            instance.address, b"POST", request.target, headers, request.body, deadline_s=request.deadlines.finished_s
        )
    except TransportError as error:
        raise failed(instance, error) from error
    if reply.status >= 400:
        raise refusal(instance, reply.status, reply.headers, reply.body)
    return Answer(reply.status, reply.header(b"content-type") or b"application/json", reply.body)
