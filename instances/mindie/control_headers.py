"""The control headers of a prefill request: checked in the engine's order, with its texts (MindIE page §4.4)."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

from instances.mindie.refusal import Refused

_HEX = re.compile(r"[0-9a-fA-F]*")
_ID_LIMIT = 1024
_PORT_LIMIT = 65535

UNKNOWN_ROLE = "The server cannot process the inference request due to an unknown status. "
WRONG_ROLE = "DMI inference requests can be sent only to the prefill node or p_percentage of the flex node == 0"
MISSING = "DMI request must have req-type, req-id, d-target headers"
BAD_TARGET = "Parameter d-target must be an IPv4 address"
BAD_RECOMPUTE = "Parameter is-recompute is an optional parameter. When it is set, it must be true or false."


@dataclass(frozen=True, slots=True)
class Control:
    """What the headers say. `inter_port`: after the `;` of d-target; `data_port`: the d-port header."""

    req_id: str
    target_host: str
    inter_port: int | None
    data_port: int | None
    recompute: bool

    @property
    def target_port(self) -> int | None:
        """Port where the decode instance is found; None where neither was given."""
        return self.inter_port if self.inter_port is not None else self.data_port


def check(role: str, headers: Mapping[str, str]) -> Control:
    """Check role and headers; raises Refused with the literal text of the first thing that is wrong."""
    if role == "none":
        raise Refused(503, UNKNOWN_ROLE)
    if role not in {"prefill", "flex"}:
        raise Refused(400, WRONG_ROLE)
    given = {name: headers.get(name) for name in ("req-type", "req-id", "d-target")}
    if any(value is None for value in given.values()):
        raise Refused(400, MISSING)
    req_id = _req_id(given["req-id"] or "")
    if given["req-type"] != "prefill":
        raise Refused(400, f"Parameter req-type must be prefill but got {given['req-type']}")
    host, inter_port = _target(given["d-target"] or "")
    recompute = headers.get("is-recompute", "false")
    if recompute not in {"true", "false"}:
        raise Refused(400, BAD_RECOMPUTE)
    data_port = headers.get("d-port", "")
    return Control(req_id, host, inter_port, int(data_port) if data_port.isdecimal() else None, recompute == "true")


def _req_id(value: str) -> str:
    if len(value) > _ID_LIMIT:
        raise Refused(400, f"The length of req-id cannot exceed {_ID_LIMIT}")
    if not value or not _HEX.fullmatch(value):
        raise Refused(
            400, f"Invalid req-id, the character of req-id should be hex char [0-9, a-f, A-F], but got {value}"
        )
    return value


def _target(value: str) -> tuple[str, int | None]:
    host, separator, port = value.partition(";")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise Refused(400, BAD_TARGET) from None
    if address.is_unspecified or (separator and not (port.isdecimal() and 0 < int(port) <= _PORT_LIMIT)):
        raise Refused(400, BAD_TARGET)
    return str(address), int(port) if separator else None
