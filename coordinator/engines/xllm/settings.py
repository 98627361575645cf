"""The settings of the engine protocol, section `engines.xllm` of the configuration."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from coordinator.config.errors import OptionError
from coordinator.engines.xllm.info import MAX_PORT, address_of

USERNAME = "ETCD_USERNAME"
PASSWORD = "ETCD_PASSWORD"  # noqa: S105  # the name of a variable
ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104  # what listens everywhere cannot be called back
MOST_ENDPOINTS = 16
MOST_S = 3600.0


@dataclass(frozen=True, slots=True)
class XllmSettings:
    """See docs/engines/xllm.md for each of them.

    Attributes:
        etcd_endpoints: URLs; empty: instances stand in the file.
        etcd_login: name and password, from the environment.
    """

    rpc_host: str = "127.0.0.1"
    rpc_port: int = 8889
    advertise: str | None = None
    etcd_endpoints: tuple[str, ...] = ()
    etcd_namespace: str = ""
    lease_ttl_s: float = 3.0
    heartbeat_timeout_s: float = 3.0
    suspect_s: float = 15.0
    call_timeout_s: float = 5.0
    order_wait_s: float = 0.2
    max_message_bytes: int = 64 << 20
    max_connections: int = 1024
    target_ttft_ms: float = 1000.0
    target_tpot_ms: float = 50.0
    etcd_login: tuple[str, str] | None = field(default=None, repr=False)


KEYS = tuple(one.name for one in fields(XllmSettings) if one.name != "etcd_login")
RENEWABLE = (
    "heartbeat_timeout_s", "suspect_s", "call_timeout_s", "order_wait_s", "target_ttft_ms", "target_tpot_ms"
)  # fmt: skip
"""Those that can be exchanged while requests run."""


def read_settings(given: Mapping[str, object]) -> Mapping[str, object]:
    """Validate the settings and fill in the defaults; the login to etcd comes from the environment.

    Raises:
        OptionError: a key is unknown or its value cannot be used.
    """
    found = {one.name: one.default for one in fields(XllmSettings)}
    for key, value in given.items():
        if key not in KEYS:
            raise OptionError(key, "unknown key", KEYS)
        try:
            found[key] = _CHECKS[key](value)
        except ValueError as error:
            raise OptionError(key, str(error), KEYS) from None
    if found["advertise"] is None and found["rpc_host"] in ANY_HOST:
        raise OptionError("advertise", "is needed where rpc_host is no single address: instances call it", KEYS)
    name, password = os.environ.get(USERNAME), os.environ.get(PASSWORD)
    if bool(name) != bool(password):
        raise OptionError("etcd_endpoints", f"{USERNAME} and {PASSWORD} must both be set, or neither", KEYS)
    found["etcd_login"] = (name, password) if name and found["etcd_endpoints"] else None
    return found


def settings_of(checked: Mapping[str, Any]) -> XllmSettings:
    """What `read_settings` has checked."""
    return XllmSettings(**checked)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")  # noqa: TRY004  # a wrong value of the file
    return value


def _peer(value: object) -> str | None:
    if value is None:
        return None
    text = _text(value)
    address_of(text)
    return text


def _endpoints(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_ENDPOINTS:
        raise ValueError(f"must be a list of at most {MOST_ENDPOINTS} addresses")
    return tuple(map(_endpoint, value))


def _endpoint(value: object) -> str:
    text = _text(value)
    address_of(text.removeprefix("http://").removeprefix("https://").rstrip("/"))
    return text.rstrip("/")


def _namespace(value: object) -> str:
    return _text(value).strip("/")


def _whole(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return value

    return check


def _number(least: float, most: float) -> Callable[[object], float]:
    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ValueError("must be a number")
        if not least <= value <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}")
        return float(value)

    return check


_CHECKS: Mapping[str, Callable[[object], object]] = {
    "rpc_host": _text,
    "rpc_port": _whole(0, MAX_PORT),
    "advertise": _peer,
    "etcd_endpoints": _endpoints,
    "etcd_namespace": _namespace,
    "lease_ttl_s": _number(1, MOST_S),
    "heartbeat_timeout_s": _number(0.1, MOST_S),
    "suspect_s": _number(0.1, MOST_S),
    "call_timeout_s": _number(0.1, MOST_S),
    "order_wait_s": _number(0, 60),
    "max_message_bytes": _whole(1024, 2**31),
    "max_connections": _whole(1, 2**20),
    "target_ttft_ms": _number(1, 10**9),
    "target_tpot_ms": _number(0.1, 10**9),
}
