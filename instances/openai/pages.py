"""The pages that vLLM and SGLang have alike."""

import time

from aiohttp import web

from instances.openai.refusal import answer


class CommonPages:
    """Health, and a list of the one model; faults and the start-up time are seen to before these.

    Args:
        model: its name.
        owner: who is said to have made it.
        more: what else is told of the model.
    """

    def __init__(self, model: str, owner: str, **more: object) -> None:
        self._card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": owner,
            "root": model,
            "parent": None,
            **more,
        }

    async def healthy(self, _: web.Request) -> web.Response:
        """Each health path."""
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return answer({"object": "list", "data": [self._card]})
