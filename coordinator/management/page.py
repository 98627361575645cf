"""`GET /`: the live page, one file that needs nothing else."""

import base64
import hashlib
import re
from importlib import resources

from aiohttp import web

PATH = "/"
FILE = "live.html"


class LivePage:
    """Serves the page.

    The browser is told to run and to show what is in the file and nothing else, to send nothing anywhere but here, and
    to let no other page frame it (Content Security Policy Level 3). The page holds nothing worth a key: what it shows
    comes from the feed, which may need one.
    """

    def __init__(self) -> None:
        text = resources.files(__package__).joinpath(FILE).read_text("utf-8")
        self._body = text.encode()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {
            "Content-Security-Policy": policy(text),
            "Cache-Control": "no-cache",
            "ETag": self._tag,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
        }

    def routes(self) -> list[web.RouteDef]:
        """The route of the page."""
        return [web.get(PATH, self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """The page, or 304 for who has it."""
        known = request.headers.get("If-None-Match", "")
        if self._tag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return web.Response(status=304, headers=self._headers)
        return web.Response(body=self._body, content_type="text/html", charset="utf-8", headers=self._headers)


def policy(html: str) -> str:
    """The content security policy under which a page's own styles and scripts work, and nobody else's."""
    styles, scripts = (" ".join(map(_source, _insides(html, tag))) for tag in ("style", "script"))
    rules = {
        "default-src": "'none'",
        "style-src": styles or "'none'",
        "script-src": scripts or "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _insides(html: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
