"""Errors of the management plane: `{"error": "a sentence"}` with the status that fits."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

log = logging.getLogger("pd_coordinator.management")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A call that cannot be done; `status` and the sentence go to the caller."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def json_reply(body: object, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error the same shape; what nobody expected is logged here and nowhere else."""
    try:
        return await handler(request)
    except Refused as error:
        return json_reply({"error": str(error)}, error.status)
    except web.HTTPException as error:
        reply = json_reply({"error": _sentence(request, error)}, error.status)
        if "Allow" in error.headers:
            reply.headers["Allow"] = error.headers["Allow"]
        return reply
    except (web.RequestPayloadError, ConnectionError):
        return json_reply({"error": "the body could not be read"}, 400)
    except Exception:
        log.exception("a call on the management plane failed")
        return json_reply({"error": "internal error of the coordinator"}, 500)


def _sentence(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        return f"there is nothing at {request.path}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return f"{request.path} does not take {error.method}, only {allowed}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return "the body is too large"
    return error.reason.lower()


async def read_json(request: web.Request) -> object:
    """The body, whatever its declared type; raises Refused (400) if it is no JSON."""
    body = await request.read()
    if not body:
        raise Refused(400, "the body is empty, a JSON object is wanted")
    try:
        value: object = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, f"the body is no valid JSON: {error}") from None
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    return value
