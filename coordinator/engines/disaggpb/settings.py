"""The keys of this engine: those of the section `engines` and those of its instances."""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.config.errors import OptionError
from coordinator.engines.disaggpb.budget import KvLimits
from coordinator.wire.disaggpb import MAX_INT32, MAX_MESSAGE_BYTES

MISSING: Final = "the engine disaggpb needs gRPC: pip install 'pd-coordinator[rpc]'"
FILES: Final = ("ca_file", "cert_file", "key_file")
TLS_KEYS: Final = (*FILES, "server_name")
UNSUPPORTED: Final = ("refuse", "ignore")
_KV_MOST: Final = MAX_MESSAGE_BYTES - (1 << 20)  # ids and lengths are in the same message
_TOTAL_MOST: Final = 1 << 50

DEFAULTS: Final[Mapping[str, object]] = {
    "max_kv_bytes": 1 << 30,
    "max_total_kv_bytes": 1 << 32,
    "kv_bytes_per_token": None,
    "kv_layers": None,
    "kv_queue": 1000,
    "kv_wait_s": 30.0,
    "max_message_bytes": 0,
    "max_new_tokens": 1024,
    "unsupported": "refuse",
    "keepalive_s": 0.0,
    "keepalive_timeout_s": 20.0,
    "keepalive_idle": False,
    "reconnect_s": 1.0,
    "ca_file": None,
    "cert_file": None,
    "key_file": None,
    "server_name": None,
}
"""Settings of the engine, which hold for all instances."""

RENEWABLE: Final = (
    "kv_bytes_per_token", "kv_queue", "kv_wait_s", "max_total_kv_bytes", "max_new_tokens", "unsupported"
)  # fmt: skip
"""Settings that can be exchanged while requests run; channels keep those that they were opened with."""

OPTIONS: Final = ("max_message_bytes",)
"""Keys of an instance besides those that all have; this one and those of TLS go before the settings of their names."""

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "max_kv_bytes": (1024, _KV_MOST),
    "max_total_kv_bytes": (1024, _TOTAL_MOST),
    "kv_bytes_per_token": (1, _KV_MOST),
    "kv_layers": (1, 10**6),
    "kv_queue": (0, 10**6),
    "kv_wait_s": (0.001, 86400),
    "max_message_bytes": (0, MAX_MESSAGE_BYTES),
    "max_new_tokens": (1, MAX_INT32),
    "keepalive_s": (0, 86400),
    "keepalive_timeout_s": (0.001, 86400),
    "reconnect_s": (0.1, 120),
}


@dataclass(frozen=True, slots=True)
class Tls:
    """What an `https://` instance is spoken to with; paths of PEM files.

    Attributes:
        ca_file: who is trusted; None: those that gRPC trusts by itself.
        cert_file: our own certificate chain, for workers that want one; `key_file` is its key.
        server_name: the name that the worker's certificate must have; None: the host of its URL.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How the channel to one instance behaves; times in seconds.

    Attributes:
        receive_bytes: the longest message that is taken.
        send_bytes: the longest message that the instance takes.
        keepalive_s: pings in a silence as long as this; 0: none.
        keepalive_idle: also while no call is on its way.
        reconnect_s: the longest wait between two tries to connect.
    """

    receive_bytes: int
    send_bytes: int
    keepalive_s: float
    keepalive_timeout_s: float
    keepalive_idle: bool
    reconnect_s: float
    tls: Tls


def check_settings(given: Mapping[str, object]) -> Mapping[str, object]:
    """The settings with their defaults; raises OptionError."""
    for key, value in given.items():
        if key not in DEFAULTS:
            raise OptionError(key, "unknown key", tuple(DEFAULTS))
        _check(key, value, tuple(DEFAULTS))
    settings = {**DEFAULTS, **given}
    for one, other in (("cert_file", "key_file"), ("key_file", "cert_file")):
        if settings[one] and not settings[other]:
            raise OptionError(one, f"needs {other} beside it", tuple(DEFAULTS))
    if _number(settings, "max_total_kv_bytes") < _number(settings, "max_kv_bytes"):
        key = "max_total_kv_bytes" if "max_total_kv_bytes" in given else "max_kv_bytes"
        raise OptionError(key, "max_total_kv_bytes must not be below max_kv_bytes", tuple(DEFAULTS))
    return settings


def check_options(given: Mapping[str, object]) -> Mapping[str, object]:
    """An instance's keys; raises OptionError, or ValueError where gRPC is not installed."""
    for key, value in given.items():
        if key not in OPTIONS:
            raise OptionError(key, "unknown key", OPTIONS)
        _check(key, value, OPTIONS)
    if importlib.util.find_spec("grpc") is None:
        raise ValueError(MISSING)
    return dict(given)


def _check(key: str, value: object, valid: tuple[str, ...]) -> None:
    reason = None
    if value is None:
        reason = None if key in (*TLS_KEYS, *OPTIONS, "kv_bytes_per_token", "kv_layers") else "must not be null"
    elif key in _RANGES:
        reason = _number_problem(key, value)
    elif key == "keepalive_idle":
        reason = None if isinstance(value, bool) else "must be true or false"
    elif key == "unsupported":
        reason = None if value in UNSUPPORTED else f"must be {' or '.join(UNSUPPORTED)}"
    elif not isinstance(value, str) or not value:
        reason = "must be text"
    elif key in FILES:
        reason = _file_problem(value)
    if reason is not None:
        raise OptionError(key, reason, valid)


def _number_problem(key: str, value: object) -> str | None:
    least, most = _RANGES[key]
    default = DEFAULTS[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a number"
    if not isinstance(default, float) and not isinstance(value, int):
        return "must be a whole number"
    return None if least <= value <= most else f"must be {least:g} to {most:g}"


def _file_problem(value: str) -> str | None:
    try:
        with Path(value).open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"cannot be read: {(error.strerror or type(error).__name__).lower()}"
    return None


def _number(settings: Mapping[str, object], key: str) -> float:
    value: Any = settings[key]
    return float(value)


def kv_limits(settings: Mapping[str, Any]) -> KvLimits:
    """The limits of memory in checked settings."""
    return KvLimits(
        request_bytes=settings["max_kv_bytes"],
        total_bytes=settings["max_total_kv_bytes"],
        queue=settings["kv_queue"],
        wait_s=settings["kv_wait_s"],
        bytes_per_token=settings["kv_bytes_per_token"],
    )


def channel_settings(settings: Mapping[str, Any], options: Mapping[str, Any]) -> ChannelSettings:
    """How to speak to one instance, from checked settings and the instance's own keys, those of TLS among them."""
    limit_bytes = options.get("max_message_bytes") or settings["max_message_bytes"] or MAX_MESSAGE_BYTES
    tls = {key: options.get(key) or settings[key] for key in TLS_KEYS}
    return ChannelSettings(
        receive_bytes=min(limit_bytes, settings["max_kv_bytes"] + (1 << 20)),
        send_bytes=limit_bytes,
        keepalive_s=settings["keepalive_s"],
        keepalive_timeout_s=settings["keepalive_timeout_s"],
        keepalive_idle=settings["keepalive_idle"],
        reconnect_s=settings["reconnect_s"],
        tls=Tls(**tls),
    )
