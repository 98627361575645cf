"""What every engine protocol is given to work with."""

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.core.ids import WireIds
from coordinator.observability.metrics import Metrics
from coordinator.tokens import Tokenizers
from coordinator.transport.client import HttpClient


@dataclass(slots=True)
class EngineContext:
    """The coordinator's means, as far as engines need them; one per process and engine.

    Times, paths and settings change when the configuration is read again, so they are to be asked for when needed; who
    keeps something made from them implements core.abilities.RenewableEngine.

    Attributes:
        client: opens every HTTP connection to an instance.
        ids: makes the ids on the engines' wires.
        connect_s: how long opening a connection may take.
        health_path: path of health checks; None: the engine's own.
        health_timeout_s: how long a health check may take.
        tokenizers: for engines that take token ids.
        settings: the engine's own, from the section `engines` of the configuration, validated by its class.
    """

    client: HttpClient
    ids: WireIds
    metrics: Metrics
    log: logging.Logger
    connect_s: float = 5.0
    health_path: str | None = None
    health_timeout_s: float = 3.0
    ssl_context: ssl.SSLContext | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    tokenizers: Tokenizers = field(default_factory=Tokenizers)
