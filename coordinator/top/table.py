"""The middle of a frame: the instances."""

import re
from collections.abc import Callable, Mapping, Sequence

from coordinator.management.live_picture import Row

from .paint import BAD, PLAIN, SOFT, WARN, Paint
from .view import View
from .words import age, clean, count, fit

ROLES = {"prefill": 0, "decode": 1, "hybrid": 2}
STATES = {"down": 0, "suspect": 1, "joining": 2, "draining": 3, "ready": 4}
GLYPHS = {"down": "x", "suspect": "!", "joining": "?", "draining": "-", "ready": "·"}
COLOURS = {"ready": PLAIN, "joining": WARN, "draining": WARN}
SEARCHED = ("id", "role", "state", "engine", "model", "reason")
MOST_FOR_ID = 24
MOST_FOR_MODEL = 20

_parts = re.compile(r"(\d+)").split
_ORDERS: Mapping[str, Callable[[Row], float]] = {
    "state": lambda one: STATES.get(one.state, -1),
    "requests": lambda one: -one.requests,
    "pinned": lambda one: -one.pinned,
    "blocks": lambda one: -one.blocks,
    "since_s": lambda one: -one.since_s,
}


def chosen(instances: Sequence[Row], view: View) -> list[Row]:
    """Those that fit the filter, in the order that is asked for; by id means by role first."""
    wanted = view.filter.lower()
    found = [one for one in instances if any(wanted in str(getattr(one, key)).lower() for key in SEARCHED)]
    found.sort(key=lambda one: _natural(one.id))
    order = _ORDERS.get(view.sort)
    if order is not None:
        found.sort(key=order)
    if view.backwards:
        found.reverse()
    if order is None:
        found.sort(key=lambda one: ROLES.get(one.role, len(ROLES)))
    return found


def table(rows: Sequence[Row], view: View, paint: Paint, now_s: float) -> list[str]:
    """The head and a line for each; `now_s` by the coordinator's clock."""
    ident = max([10, *(min(MOST_FOR_ID, len(clean(one.id))) for one in rows)])
    model = max([6, *(min(MOST_FOR_MODEL, len(clean(one.model))) for one in rows)])

    def head(key: str, text: str) -> str:
        return f"{text} {'^' if view.backwards else 'v'}" if key == view.sort else text

    lines = [
        paint.title(
            f"{fit(head('id', 'INSTANCE'), ident)} {'ROLE':<8} {fit(head('state', 'STATE'), 10)}"
            f" {head('requests', 'IN FLIGHT'):>11} {head('pinned', 'PINNED'):>8} {head('blocks', 'BLOCKS'):>8}"
            f" {head('since_s', 'SINCE'):>7}  {'ENGINE':<12} {fit('MODEL', model)} NOTE"
        )
    ]
    for one in rows:
        state = one.state
        text = (
            f"{fit(clean(one.id), ident)} {one.role:<8} {GLYPHS.get(state, ' ')} {fit(state, 8)}"
            f" {count(one.requests):>11} {count(one.pinned):>8} {count(one.blocks):>8}"
            f" {age(now_s - one.since_s):>7}  {fit(clean(one.engine), 12)} {fit(clean(one.model), model)}"
            f" {one.reason}"
        )
        lines.append(paint.line((COLOURS.get(state, BAD), clean(text))))
    if not rows:
        lines.append(paint.line((SOFT, "nothing fits the filter" if view.filter else "no instance is known")))
    return lines


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Orders d9 before d10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _parts(text)]
