"""One engine serves alone: mode round-robin, and hybrid instances (microserving protocol page §5)."""

import math
import time

from msgspec.structs import replace

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Outcome, Placement
from coordinator.core.request import Request
from coordinator.engines.headers import engine_headers
from coordinator.engines.http_leg import check_whole, failed, run_stream, side_of
from coordinator.engines.microserving.ends import given_back
from coordinator.engines.microserving.leg import OK, GenerateLeg
from coordinator.engines.microserving.means import Means, explained
from coordinator.engines.microserving.task import Task
from coordinator.transport.errors import TransportError
from coordinator.wire.chat_shape import whole_answer
from coordinator.wire.completion_stream import CompletionEditor
from coordinator.wire.microserving import plain_body


async def serve_alone(
    means: Means, request: Request, placement: Placement, instance: Instance, task: Task, out: Out
) -> Outcome:
    """Pass a request to one engine, on the client's own path, and its answer back.

    Cancellation closes the connection, which ends the request at the engine.

    Raises:
        RequestError: see core.errors.
    """
    wire_id = means.ids.next()
    headers = engine_headers(request, wire_id)
    asked = replace(request, body=plain_body(task.fields, task.last, wire_id))
    if instance is not placement.prefill:
        placement.skip_prefill()
    placement.prefill_sent(wire_id)
    try:
        if task.stream:
            editor = CompletionEditor(task.reading(wire_id))
            leg = GenerateLeg(instance, placement, out, editor)
            await run_stream(means.client, asked, headers, leg)
            return await given_back(means, task, instance, out, editor) if leg.preempted else COMPLETED
        reply = await means.client.fetch(
            instance.address, b"POST", asked.target, headers, asked.body, deadline_s=math.inf
        )
    except TransportError as error:
        raise failed(instance, error) from error
    if reply.status != OK:
        raise explained(instance, reply)
    check_whole(instance, reply.body)
    try:
        body, preempted = whole_answer(reply.body, task.reading(wire_id), chat=False)
    except ValueError as error:
        raise EngineFailed(side_of(instance), instance.id, "bad_reply", detail=str(error)) from error
    if preempted:
        return await given_back(means, task, instance, out)
    now_s = time.monotonic()
    placement.prefilled(now_s)
    placement.decoding(now_s)
    out.whole(body, now_s)
    return COMPLETED
