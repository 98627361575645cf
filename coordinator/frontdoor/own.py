"""Answers that need no engine: models, metadata, probes."""

import time
from collections.abc import Callable

from coordinator.api import openai, tgi, triton
from coordinator.api.family import Family
from coordinator.api.routes import Match
from coordinator.frontdoor.models import ModelNames


class OwnAnswers:
    """Makes the answers of our own.

    Args:
        ready: whether a request could be placed now, and the sentence that says why (not).
        version: ours.
    """

    def __init__(self, models: ModelNames, ready: Callable[[], tuple[bool, str]], version: str) -> None:
        self._models = models
        self._ready = ready
        self._version = version
        self._started_s = int(time.time())

    def answer(self, match: Match, family: Family) -> tuple[int, bytes]:
        """Status and body; raises UnknownModel."""
        name = match.params.get("model")
        ready, _ = self._ready()
        if name is not None:
            self._models.known(name)
        match family.name, match.operation:
            case "openai", "models":
                return 200, openai.models_body(self._models.names(), self._started_s)
            case "openai", "model":
                return 200, openai.model_body(str(name), self._started_s)
            case "tgi", "info":
                return 200, tgi.info_body(next(iter(self._models.names()), None), self._version)
            case "tgi", _:
                return (200 if ready else 503), tgi.health_body(ready=ready)
            case "triton", "server":
                return 200, triton.server_body(self._version)
            case "triton", "model":
                return 200, triton.model_body(str(name))
            case "triton", "config":
                return 200, triton.model_config_body(str(name))
            case "triton", "live":
                return 200, triton.live_body()
            case _:
                return (200 if ready else 503), triton.ready_body(ready=ready)
