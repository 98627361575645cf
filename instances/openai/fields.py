"""Typed, checked access to a JSON body: null counts as absent, unknown keys pass, a wrong type or range is refused."""

from collections.abc import Mapping
from typing import Any

from instances.openai.refusal import invalid

MOST_TOKENS = 10_000_000
_TOKEN_LIMIT = 2**32


class Fields:
    """The fields of one object; every getter raises Refused (400)."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def get(self, name: str) -> Any:
        """The value as it is; None if absent."""
        return self._data.get(name)

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name}: Input should be a valid boolean", name)
        return value

    def integer(self, name: str, low: int, high: int = MOST_TOKENS) -> int | None:
        """An integer in low..high."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(f"{name}: Input should be a valid integer", name)
        if not low <= value <= high:
            raise invalid(f"{name} must be between {low} and {high}, got {value}.", name)
        return value

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A number in low..high; with `above` the lower bound itself is refused."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid(f"{name}: Input should be a valid number", name)
        if not low <= value <= high or (above and value == low):
            raise invalid(f"{name} must be in {'(' if above else '['}{low}, {high}], got {value}.", name)
        return float(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name}: Input should be a valid string", name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._data.get(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise invalid(f"{name}: Input should be a string or a list of strings", name)
        return tuple(values)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A list of token ids; absent is the same as empty."""
        value = self._data.get(name)
        if value is not None and not is_token_ids(value):
            raise invalid(f"{name}: Input should be a list of token ids", name)
        return tuple(value or ())

    def object(self, name: str) -> "Fields | None":
        """A nested object."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(f"{name}: Input should be a valid dictionary", name)
        return Fields(value)

    def check_sampling(self) -> None:
        """Ranges of the sampling parameters."""
        self.number("temperature", 0, 100)
        self.number("top_p", 0, 1, above=True)
        self.number("min_p", 0, 1)
        self.integer("top_k", -1, 2**31 - 1)
        self.number("presence_penalty", -2, 2)
        self.number("frequency_penalty", -2, 2)
        self.number("repetition_penalty", 0, 2, above=True)


def is_token_ids(value: object) -> bool:
    """Whether this is a list of token ids."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _TOKEN_LIMIT for item in value
    )
