"""Requests and calls that one instance does alone: they go to it as they are, and so does its answer to the client."""

from coordinator.core.instance import Instance
from coordinator.core.ports import Answer, Out, Outcome, Placement
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import failed, refusal, relay_plain
from coordinator.transport.errors import TransportError


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
