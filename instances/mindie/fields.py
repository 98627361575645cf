"""Typed, checked access to a JSON body; null counts as absent, unknown keys pass."""

from collections.abc import Mapping
from typing import Any

from instances.mindie.refusal import invalid

_DMI_REFUSED = ("use_beam_search", "logprobs", "top_logprobs")
_STOP_WORDS = ("stop", "stop_token_ids", "include_stop_str_in_output")
_TOKEN_LIMIT = 2**32
MOST_TOKENS = 1_000_000


class Fields:
    """The fields of one object; every getter raises Refused (422) for a wrong type or range."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """A boolean."""
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(f"{name} must be a boolean")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in low..high."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} must be an integer in [{low}, {high}]")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number in low..high."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(f"{name} must be a number in [{low}, {high}]")
        return float(value)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name} must be a string")
        return value

    def needed_text(self, name: str) -> str:
        """A string that must be there and not be empty."""
        value = self.text(name)
        if not value:
            raise invalid(f"{name} must be a non-empty string")
        return value

    def fields(self, name: str) -> "Fields":
        """A nested object; absent is the same as empty."""
        value = self._data.get(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{name} must be an object")
        return Fields(value or {})

    def limit(self, *names: str) -> int | None:
        """The first token limit that is given under one of these names."""
        given = [self.integer(name, 1, MOST_TOKENS) for name in names]
        return next((value for value in given if value is not None), None)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._data.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise invalid(f"{name} must be a string or a list of strings")
        return tuple(values)

    def check_sampling(self) -> None:
        """Ranges of the sampling parameters that the families share."""
        self.number("temperature", 0, 2)
        self.number("top_p", 1e-9, 1)
        self.integer("top_k", -1, 2**31 - 1)
        self.number("presence_penalty", -2, 2)
        self.number("frequency_penalty", -2, 2)
        self.number("repetition_penalty", 1e-9, 2)

    def check_mode(self, *, dmi: bool, stop_words: bool) -> None:
        """What is refused when prefill and decode are apart (MindIE protocol page §2.1); `n` is 1 in any case.

        Args:
            dmi: prefill and decode are apart.
            stop_words: whether the family takes stop words in that mode.
        """
        mode = " in dmi mode" if dmi else ""
        for name in ("n", "best_of"):
            if self._data.get(name) not in (None, 1):
                raise invalid(f"{name} must be 1{mode}")
        refused = _DMI_REFUSED if stop_words else (*_DMI_REFUSED, *_STOP_WORDS)
        for name in refused if dmi else ():
            if self._data.get(name) not in (None, False, [], ""):
                raise invalid(f"{name} is not supported in dmi mode")

    def chosen(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Those of `names` that are set, in that order."""
        return {name: self._data[name] for name in names if self._data.get(name) is not None}


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """A non-empty list of token ids; raises Refused."""
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _TOKEN_LIMIT for v in value)
    ):
        raise invalid(f"{name} must be a non-empty list of token ids")
    return tuple(value)


def split_recompute(ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Prompt tokens and generated tokens of `N,p1..pN,r1..rM`; raises Refused."""
    count = ids[0]
    if count < 1 or len(ids) < count + 1:
        raise invalid("the recompute input has fewer tokens than it says")
    return ids[1 : count + 1], ids[count + 1 :]


def recompute_ids(text: object, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same from the comma-separated text."""
    parts = text.split(",") if isinstance(text, str) else []
    if not parts or not all(part.isascii() and part.isdecimal() for part in parts):
        raise invalid(f"{name} must be comma-separated token ids in a recompute request")
    return split_recompute(tuple(int(part) for part in parts))
