"""The configuration on the management plane: what is in force, read it again, how much is logged."""

from typing import Protocol

from aiohttp import web
from pydantic import ValidationError

from coordinator.config import ConfigError, Logging, Problem, Settings, shown_settings
from coordinator.config.errors import dotted
from coordinator.config.explain import explain

from .errors import Refused, json_reply, read_json
from .screen import ABOUT

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

    @property
    def logging(self) -> Logging:
        """How lines of the log are written, and which."""
        ...

    async def reload(self, *, dry_run: bool = False) -> Report:
        """Read the file and go by it; raises ConfigError."""
        ...

    def log_by(self, logging: Logging) -> None:
        """Log in this way until the file is read again."""
        ...


class ConfigCalls:
    """Handlers of these calls."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    def routes(self) -> list[web.RouteDef]:
        """The routes of this part."""
        return [
            web.get("/v1/config", self.show),
            web.post("/v1/config/reload", self.reload),
            web.get("/v1/log-level", self.show_levels),
            web.put("/v1/log-level", self.set_levels),
        ]

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

    async def show_levels(self, _request: web.Request) -> web.Response:
        """What is logged: the level of all loggers, and of those that have one of their own."""
        return self._levels()

    async def set_levels(self, request: web.Request) -> web.Response:
        """Exchange the level of all, of single ones, or both: 200, or 400 for what is none. null: no level of its own.

        It holds until the configuration is read again.
        """
        given = await read_json(request)
        if not isinstance(given, dict) or not given or not set(given) <= {"level", "levels"}:
            raise Refused(400, 'the body must be like {"level": "info", "levels": {"pd_coordinator.engines": "debug"}}')
        before = self._configuration.logging
        own = given.get("levels") or {}
        if not isinstance(own, dict):
            raise Refused(400, "levels must be an object of loggers and levels")
        merged: dict[str, object] = {**before.levels, **own}
        levels = {name: level for name, level in merged.items() if level is not None}
        wanted = {"level": given.get("level", before.level), "levels": levels, "format": before.format}
        try:
            logging = Logging.model_validate(wanted)
        except ValidationError as error:
            told = (f"{dotted(found.path)}: {found.reason}" for found in explain(error, wanted, Logging))
            raise Refused(400, "; ".join(told)) from None
        request[ABOUT] = " ".join((logging.level, *(f"{name}:{level}" for name, level in logging.levels.items())))
        self._configuration.log_by(logging)
        return self._levels()

    def _levels(self) -> web.Response:
        logging = self._configuration.logging
        return json_reply({"level": logging.level, "levels": dict(logging.levels)})


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
