"""The fault menu: what can be made to go wrong, for which requests, and when.

One notation everywhere (options, control calls, prompt markers `[[fault:...]]`):

    [selector:]...name[@k][=value]

`@k` is a token of the answer, prefill's being the first. Selectors, all of which must hold: `#n` the n-th inference
request of this instance, `first=n` the first n, `rate=p` a random share p, `on=NAME` only the instance of that name.
"""

import difflib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# name -> (kind of value: flag, number or text; explanation)
Menu = Mapping[str, tuple[str, str]]
COMMON_MENU: Menu = MappingProxyType(
    {
        "status": ("number", "answer with this HTTP status (value, default 500) and the engine's error body"),
        "body": ("text", "with `status`: the body, instead of the engine's error body"),
        "hang": ("flag", "read the request and never answer"),
        "delay": ("number", "wait this many seconds before the work begins"),
        "close": ("flag", "close the connection (FIN) instead of answering"),
        "reset": ("flag", "reset the connection (RST) instead of answering"),
        "crash": (
            "number",
            "the whole instance dies: connections reset, state lost, port closed; value: back after s seconds",
        ),
        "api_key": ("text", "401 unless `Authorization: Bearer <value>` is sent"),
        "max_payload": ("number", "413 for bodies above this many bytes"),
        "content_type": ("text", "answer with this content type"),
        "gzip": ("flag", "answer with a gzip-compressed body that nobody asked for"),
        "empty": ("flag", "answer 200 with an empty body"),
        "cut_after": ("number", "close (FIN) after this many bytes of the answer's body"),
        "reset_after": ("number", "reset (RST) after this many bytes of the answer's body"),
        "split_bytes": ("flag", "send the answer's body byte by byte"),
        "health_status": ("number", "health paths answer this status (value, default 503) while work goes on"),
        "health_hang": ("flag", "health paths never answer"),
        "health_fail_after": ("number", "health paths answer 503 from this many milliseconds after the start"),
    }
)

_SELECTOR = re.compile(r"(#\d+|first=\d+|rate=[0-9.]+|on=[\w.\-]+):")
_FAULT = re.compile(r"(?P<name>[a-z_]+)(?:@(?P<at>\d+))?(?:=(?P<value>.*))?", re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_MARK = re.compile(r"\[\[fault:(.+?)\]\]", re.DOTALL)


class BadFault(ValueError):
    """A fault that is not on the menu, or not in the notation."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at`: token of the answer; None: not bound to a token. `value`: text after `=`, may be empty."""

    text: str
    name: str
    at: int | None = None
    value: str = ""
    selectors: tuple[str, ...] = ()

    def number(self, default: float) -> float:
        """The value as a number; `default` where there is none."""
        return float(self.value) if self.value else default


def parse(text: str, menu: Menu) -> Fault:
    """Read one fault; raises BadFault, with the nearest name for a typo."""
    rest, selectors = text.strip(), []
    while found := _SELECTOR.match(rest):
        selectors.append(found.group(1))
        rest = rest[found.end() :]
    match = _FAULT.fullmatch(rest)
    if match is None:
        raise BadFault(f"{text!r} is not of the form [selector:]name[@k][=value]")
    name = match.group("name")
    if name not in menu:
        near = difflib.get_close_matches(name, menu, 1)
        raise BadFault(f"no fault {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    value, kind = match.group("value") or "", menu[name][0]
    if value and (kind == "flag" or (kind == "number" and not _NUMBER.fullmatch(value))):
        raise BadFault(f"fault {name!r} takes {'a number' if kind == 'number' else 'no value'}, not {value!r}")
    at = match.group("at")
    return Fault(text, name, int(at) if at else None, value, tuple(selectors))


class Chosen:
    """The faults that hold for one request."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._by_name = {fault.name: fault for fault in faults}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Fault | None:
        """The fault of that name."""
        return self._by_name.get(name)

    def number(self, name: str, default: float = 0.0, absent: float = 0.0) -> float:
        """Value of a fault as a number; `default` if it has none, `absent` if the fault is not chosen."""
        fault = self._by_name.get(name)
        return absent if fault is None else fault.number(default)

    def at(self, name: str, token: int, default: int = 1) -> Fault | None:
        """The fault if it is due exactly when `token` tokens exist; without `@k` that is `default`."""
        fault = self._by_name.get(name)
        if fault is None or (default if fault.at is None else fault.at) != token:
            return None
        return fault

    def on_piece(self, name: str, token: int) -> Fault | None:
        """The fault if it shapes the piece of this token; without `@k` it shapes every piece."""
        fault = self._by_name.get(name)
        return fault if fault is not None and fault.at in (None, token) else None


class Faults:
    """The faults set for an instance, and the choice for each request.

    Args:
        menu: names that are allowed, with their explanation.
        name: the instance's name, for `on=`.
        seed: of the random shares.
        given: faults set from the start; raises BadFault if one is wrong.
    """

    def __init__(self, menu: Menu, name: str, seed: object, given: Iterable[str] = ()) -> None:
        self.menu = menu
        self.name = name
        self._rng = random.Random(f"faults:{seed}")
        self._set: list[Fault] = []
        self.replace(given)

    def replace(self, given: Iterable[str]) -> None:
        """Set exactly these; raises BadFault and changes nothing if one is wrong."""
        self._set = [parse(text, self.menu) for text in given]

    def add(self, given: Iterable[str]) -> None:
        """Set these too."""
        self._set += [parse(text, self.menu) for text in given]

    def texts(self) -> list[str]:
        """What is set, in the notation."""
        return [fault.text for fault in self._set]

    def _holds(self, fault: Fault, ordinal: int) -> bool:
        for selector in fault.selectors:
            key, _, value = selector.partition("=")
            if selector.startswith("#"):
                holds = ordinal == int(selector[1:])
            elif key == "first":
                holds = ordinal <= int(value)
            elif key == "rate":
                holds = self._rng.random() < float(value)
            else:
                holds = value == self.name
            if not holds:
                return False
        return True

    def choose(self, ordinal: int, text: str = "") -> Chosen:
        """Faults for the request number `ordinal` (from 1); `text` is searched for markers. Raises BadFault."""
        if not self._set and "[[fault:" not in text:
            return Chosen()
        marked = [parse(found, self.menu) for found in _MARK.findall(text)]
        return Chosen(fault for fault in (*self._set, *marked) if self._holds(fault, ordinal))

    def always(self) -> Chosen:
        """Faults without a selector on single requests: for health paths, links and the like."""
        return Chosen(f for f in self._set if all(s.startswith("on=") for s in f.selectors) and self._holds(f, 0))
