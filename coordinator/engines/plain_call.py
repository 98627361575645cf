"""Calls that are no inference, passed through to one instance as they are."""

from coordinator.core.instance import Instance
from coordinator.core.ports import Answer
from coordinator.core.request import Request
from coordinator.engines.http_leg import failed, refusal
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.request import GivenHeaders


async def pass_through(client: HttpClient, request: Request, headers: GivenHeaders, instance: Instance) -> Answer:
    """Send a call to an instance, on the client's own path, and return its answer.

    Raises:
        RequestError: EngineRefused for a 4xx, EngineFailed where there is no answer or another error.

    Cancellation closes the connection.
    """
    try:
        reply = await client.fetch(
            instance.address, b"POST", request.target, headers, request.body, deadline_s=request.deadlines.finished_s
        )
    except TransportError as error:
        raise failed(instance, error) from error
    if reply.status >= 400:
        raise refusal(instance, reply.status, reply.headers, reply.body)
    return Answer(reply.status, reply.header(b"content-type") or b"application/json", reply.body)
