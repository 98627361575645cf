"""Reading `bootstrap_host`, `bootstrap_port` and `bootstrap_room` (SGLang protocol page §1, §2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instances.openai.ask import Ask
from instances.openai.fields import Fields
from instances.openai.refusal import invalid

_ROOMS = 2**63
_PORTS = 65_535


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the legs of one sequence meet."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """Data-parallel ranks that a request names: its own, and that of prefill."""

    own: int | None
    prefill: int | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "Ranks":
        """Raises Refused."""
        fields = Fields(body)
        own = fields.integer("routed_dp_rank", 0)
        return cls(
            fields.integer("data_parallel_rank", 0) if own is None else own, fields.integer("disagg_prefill_dp_rank", 0)
        )


def read(body: Mapping[str, Any], ask: Ask, default_port: int) -> list[Meeting]:
    """A meeting for each sequence; raises Refused.

    A batch (a list of prompts, or n above 1) has arrays of its length, with rooms that differ; anything else has
    single values. A batch of one takes either.
    """
    if body.get("bootstrap_room") is None:
        raise invalid("Disaggregated request received without bootstrap room id.", "bootstrap_room")
    count = ask.sequences
    rooms = [_room(value) for value in _spread(body, "bootstrap_room", count, batched=ask.batched)]
    hosts = [_host(value) for value in _spread(body, "bootstrap_host", count, batched=ask.batched)]
    ports = [_port(value, default_port) for value in _spread(body, "bootstrap_port", count, batched=ask.batched)]
    if len(set(rooms)) != count:
        raise invalid("bootstrap_room: the rooms of a batch must differ", "bootstrap_room")
    return [Meeting(*one) for one in zip(hosts, ports, rooms, strict=True)]


def _spread(body: Mapping[str, Any], name: str, count: int, *, batched: bool) -> list[Any]:
    value = body.get(name)
    if isinstance(value, list):
        if not batched and count == 1:
            raise invalid(f"{name}: a list is for batches only", name)
        if len(value) != count:
            raise invalid(f"{name}: {count} values are needed, got {len(value)}", name)
        return value
    if count > 1:
        raise invalid(f"{name}: a batch needs a list of {count} values", name)
    return [value]


def _room(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _ROOMS:
        raise invalid("bootstrap_room: Input should be an integer in [0, 2^63-1]", "bootstrap_room")
    return value


def _host(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise invalid("bootstrap_host: Input should be a non-empty string", "bootstrap_host")
    return value


def _port(value: Any, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _PORTS:
        raise invalid("bootstrap_port: Input should be a valid port number", "bootstrap_port")
    return value
