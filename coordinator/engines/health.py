"""The health check of engines over plain HTTP."""

from coordinator.core.instance import Instance
from coordinator.engines.http_leg import failed, refusal
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply


async def alive(client: HttpClient, instance: Instance, path: str, deadline_s: float) -> Reply:
    """Ask a path: alive is whoever answers without a 5xx, by `deadline_s` (monotonic). Returns the answer.

    Raises:
        RequestError: it is not alive; EngineFailed names why.
    """
    try:
        reply = await client.fetch(instance.address, b"GET", path, (), deadline_s=deadline_s)
    except TransportError as error:
        raise failed(instance, error) from error
    if reply.status >= 500:
        raise refusal(instance, reply.status, reply.headers, b"")
    return reply
