"""The rooms of a prefill instance: where its legs and those of decode instances meet (SGLang protocol page §1-§4).

A decode leg is a private call that lasts until the transfer is over; if the caller of decode leaves, the call is cut,
and prefill is not told: its leg waits for the end of its own time.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from instances.sglang.refusal import ABORTED

if TYPE_CHECKING:
    from instances.sglang.instance import SglangEngine


@dataclass(slots=True)
class Room:
    """One room.

    Attributes:
        prefill, decode: set while that leg is there.
        over: what decode is told: `kv`, or `error`.
    """

    key: tuple[int, int]
    prefill: asyncio.Event = field(default_factory=asyncio.Event)
    decode: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: dict[str, Any] = field(default_factory=dict)


class Rooms:
    """All rooms of one prefill instance, by rank and number."""

    def __init__(self, engine: "SglangEngine") -> None:
        self._engine = engine
        self._open: dict[tuple[int, int], Room] = {}
        self.transferred = self.duplicates = 0

    def rank(self, room: int, named: int | None) -> int:
        """The rank that a room belongs to."""
        return room % self._engine.settings.dp_size if named is None else named

    def enter(self, key: tuple[int, int]) -> Room | None:
        """The prefill leg opens a room; None if it is open already."""
        room = self._open.setdefault(key, Room(key))
        if room.prefill.is_set():
            self.duplicates += 1
            return None
        room.prefill.set()
        return room

    def leave(self, room: Room, outcome: dict[str, Any]) -> None:
        """The prefill leg is done with a room; the decode leg is told, if it is there."""
        if not room.over.is_set():
            room.outcome = outcome
            room.over.set()
            self.transferred += "kv" in outcome
        if self._open.get(room.key) is room:
            del self._open[room.key]

    async def join(self, request: web.Request) -> web.Response:
        """`POST /sim/room/join`: a decode leg; answers when the transfer is over, or has failed. 404 if not prefill."""
        if self._engine.instance.role != "prefill":
            return web.json_response({"error": "This is no bootstrap server."}, status=404)
        given = await request.json()
        key = (self.rank(given["room"], given["rank"]), given["room"])
        room = self._open.setdefault(key, Room(key))
        if room.decode.is_set():
            self.duplicates += 1
            return web.json_response({"error": f"bootstrap_room {given['room']} is in use"})
        room.decode.set()
        try:
            for event, limit_s in (
                (room.prefill, given["bootstrap_timeout_s"]),
                (room.over, given["waiting_timeout_s"]),
            ):
                async with asyncio.timeout(limit_s):
                    await event.wait()
        except TimeoutError:
            return web.json_response({"error": f"{ABORTED} The prefill leg did not come in time."})
        finally:
            room.decode.clear()
            if not room.prefill.is_set() and self._open.get(key) is room:
                del self._open[key]
        return web.json_response(room.outcome)

    def forget(self) -> None:
        """Every room fails."""
        for room in list(self._open.values()):
            self.leave(room, {"error": ABORTED})

    def state(self) -> list[dict[str, Any]]:
        """Who is in which room, as JSON."""
        return [
            {"rank": key[0], "room": key[1], "prefill": room.prefill.is_set(), "decode": room.decode.is_set()}
            for key, room in self._open.items()
        ]
