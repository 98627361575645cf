"""What is asked of engines over plain HTTP now and then: whether they are alive, and their model."""

from coordinator.core.instance import Instance
from coordinator.engines.http_leg import failed, refusal
from coordinator.transport.client import HttpClient
from coordinator.transport.errors import TransportError
from coordinator.transport.reply import Reply
from coordinator.wire.models import first_model

MODELS_PATH = "/v1/models"


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


async def takes_key(client: HttpClient, instance: Instance, deadline_s: float) -> None:
    """Where it gets a key of ours, ask for something that wants one; raises EngineFailed as `told_model`."""
    if client.peers.of(instance.address).key:
        await told_model(client, instance, deadline_s)


async def told_model(client: HttpClient, instance: Instance, deadline_s: float) -> str | None:
    """The first of the models that it lists, by `deadline_s` (monotonic); None where it does not tell.

    Raises:
        EngineFailed: it refuses our key, so it can serve nobody, although its health path may want none.
    """
    try:
        reply = await client.fetch(instance.address, b"GET", MODELS_PATH, (), deadline_s=deadline_s)
    except TransportError as error:
        if error.reason == "key_refused":
            raise failed(instance, error) from error
        return None
    return first_model(reply.body) if reply.status == 200 else None
