"""What a client may do to this server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a client may do.

    Attributes:
        max_body_bytes: largest body, as it comes and expanded.
        max_header_bytes: largest request line with headers.
        idle_s: how long a connection may stay open without a request.
        head_s: how long a head may take from its first byte on.
        body_s: longest silence while a body is on its way, and how far it may be behind its least pace.
        body_bytes_per_s: that pace: who sends less holds a connection for nothing.
        max_connections: further ones wait in the kernel's backlog; None: no bound.
    """

    max_body_bytes: int = 33554432
    max_header_bytes: int = 32768
    idle_s: float = 75.0
    head_s: float = 20.0
    body_s: float = 120.0
    body_bytes_per_s: float = 1024.0
    max_connections: int | None = None
