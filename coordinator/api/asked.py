"""Fields of a request that is read to the end: each has a type and a range, and a client is told which one is wrong."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.wire.json_edit import Fields, given

T = TypeVar("T")

MOST_ID: Final = 2**31 - 1  # engines keep token ids in 32 bits with a sign
MOST_TOKENS: Final = 2**31 - 1
MOST_SEED: Final = 2**64 - 1
MOST_STOPS: Final = 64
_BROKEN: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Asked:
    """The fields of one object; a null is as good as an absent field. Every getter raises BadRequest.

    Args:
        fields: the object's.
        inside: what stands before their names in messages.
    """

    __slots__ = ("_fields", "_inside")

    def __init__(self, fields: Fields, inside: str = "") -> None:
        self._fields = fields
        self._inside = inside

    def raw(self, name: str) -> Raw | None:
        """The field as it was written."""
        value = self._fields.get(name)
        return value if given(value) else None

    def typed(self, name: str, kind: type[T], wanted: str) -> T | None:
        """The field as a type of msgspec's; `wanted` says in words what it must be."""
        value = self.raw(name)
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=kind)
        except _BROKEN:
            raise self.wrong(name, wanted) from None

    def wrong(self, name: str, wanted: str) -> BadRequest:
        """The error for a field that is not what it must be."""
        return BadRequest(f"`{self._inside}{name}` must be {wanted}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self.typed(name, bool, "true or false")
        return default if value is None else value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """An integer in low..high."""
        wanted = f"a whole number from {low} to {high}"
        value = self.typed(name, int, wanted)
        if value is not None and not low <= value <= high:
            raise self.wrong(name, wanted)
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A number in low..high; with `above` the lower bound itself is too low."""
        wanted = f"a number {'above' if above else 'from'} {low:g}, at most {high:g}"
        value = self.typed(name, float, wanted)
        if value is not None and not (low < value <= high if above else low <= value <= high):
            raise self.wrong(name, wanted)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings, none of them empty."""
        wanted = f"a string, or a list of at most {MOST_STOPS} strings, none of them empty"
        kind: Any = str | list[str]
        value: str | list[str] | None = self.typed(name, kind, wanted)
        found = (value,) if isinstance(value, str) else tuple(value or ())
        if len(found) > MOST_STOPS or "" in found:
            raise self.wrong(name, wanted)
        return found

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids."""
        value = self.typed(name, list[int], "a list of token ids")
        return self._checked(name, value or [])

    def inner(self, name: str) -> "Asked":
        """A nested object; an empty one where it is absent."""
        fields = self.typed(name, dict[str, Raw], "an object")
        return Asked(fields or {}, f"{self._inside}{name}.")

    def plain(self, name: str) -> Mapping[str, object]:
        """A nested object of which everything is built."""
        return self.typed(name, dict[str, Any], "an object") or {}

    def prompts(self, name: str) -> list[str | tuple[int, ...]]:
        """One prompt or several: text, token ids, or a list of either."""
        wanted = "a string, a list of token ids, or a list of prompts of one kind"
        value = self.raw(name)
        if value is None:
            raise BadRequest(f"`{self._inside}{name}` is missing")
        for kind in (str, list[int], list[str], list[list[int]]):
            try:
                found: Any = msgspec.json.decode(value, type=kind)
            except _BROKEN:
                continue
            several: list[Any] = found if kind in (list[str], list[list[int]]) else [found]
            if (not found or [] in several) and kind is not str:
                raise BadRequest(f"`{self._inside}{name}` is empty")
            return [one if isinstance(one, str) else self._checked(name, one) for one in several]
        raise self.wrong(name, wanted)

    def _checked(self, name: str, ids: list[int]) -> tuple[int, ...]:
        if ids and not (min(ids) >= 0 and max(ids) <= MOST_ID):
            raise self.wrong(name, f"token ids from 0 to {MOST_ID}")
        return tuple(ids)
