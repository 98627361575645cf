"""The configuration on the management plane: what is in force, and read it again."""

from typing import Protocol

from aiohttp import web

from coordinator.config import ConfigError, Problem, Settings, shown_settings

from .errors import Refused, json_reply

YES = ("1", "true", "yes")
NO = ("", "0", "false", "no")


class Report(Protocol):
    """What came of reading the configuration again."""

    def as_data(self) -> dict[str, object]:
        """The body of the answer."""
        ...


class Configuration(Protocol):
    """Who reads the configuration and knows which one is in force."""

    @property
    def settings(self) -> Settings:
        """Those in force."""
        ...

    @property
    def waiting(self) -> tuple[str, ...]:
        """Keys that differ in the file and wait for the next start."""
        ...

    async def reload(self, *, dry_run: bool = False) -> Report:
        """Read the file and go by it; raises ConfigError."""
        ...


class ConfigCalls:
    """Handlers of these calls."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part."""
        return [web.get("/v1/config", self.show), web.post("/v1/config/reload", self.reload)]

    async def show(self, _request: web.Request) -> web.Response:
        """The settings in force with every default; secrets are masked."""
        settings = self._configuration.settings
        return json_reply(
            {
                "file": settings.source.name,
                "settings": shown_settings(settings),
                "restart": list(self._configuration.waiting),
            }
        )

    async def reload(self, request: web.Request) -> web.Response:
        """Read the file again: 200 with what has changed, or 400 with all that is wrong, and nothing has changed."""
        dry_run = _flag(request, "dry_run")
        try:
            report = await self._configuration.reload(dry_run=dry_run)
        except ConfigError as error:
            body = {
                "error": "the configuration is not used, nothing has changed",
                "file": error.name,
                "problems": [_problem(problem) for problem in error.problems],
            }
            return json_reply(body, 400)
        return json_reply({"applied": not dry_run} | report.as_data())


def _flag(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "").lower()
    if value not in (*YES, *NO):
        raise Refused(400, f"{name} must be true or false")
    return value in YES


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "path": problem.path_in_file,
        "line": problem.line,
        "reason": problem.reason,
        "hint": problem.hint,
    }
