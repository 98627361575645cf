"""What the sources of instances are up to (`GET /v1/discovery`)."""

from collections.abc import Callable, Sequence

from aiohttp import web

from .errors import json_reply

Rows = Callable[[], Sequence[dict[str, object]]]


class SourcesApi:
    """Shows the sources: whether each could be asked, what it names, and what of that is not used.

    Args:
        rows: one for each source.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part."""
        return [web.get("/v1/discovery", self.show)]

    async def show(self, _request: web.Request) -> web.Response:
        """All sources, in the order of the configuration."""
        return json_reply({"sources": self._rows()})
