"""One owner for every result stream when several processes serve (`server.workers`).

A decode instance accepts one `GET /dresult`. The supervisor holds it and passes messages on to the process whose number
stands in the upper bits of their request id, all of one read in one message.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from coordinator.core.ids import worker_of
from coordinator.core.instance import Instance
from coordinator.engines.mindie.boxes import Boxes
from coordinator.wire.mindie import Frame, Kind
from coordinator.wire.packing import plain

Tell = Callable[[int | None, bytes], None]
"""Send bytes to the other half in one worker, or in all of them (None)."""

MAX_KNOWN_IDS = 65536
_KINDS = tuple(Kind)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_DATA = _NUMBERS[Kind.DATA]


class _Word(msgspec.Struct, array_like=True, tag=True):
    """A message between the halves."""


class Opened(_Word):
    """The stream `number` is open."""

    number: int
    instance: Instance


class Lost(_Word):
    """The stream `number` is lost."""

    number: int
    reason: str


class Doubt(_Word):
    """A message of the stream `number` has lost its id; `kind` as in Frames."""

    number: int
    kind: int


class Frames(_Word):
    """Messages of the stream `number`: id, kind, body."""

    number: int
    frames: list[tuple[bytes, int, bytes]]


class Model(_Word):
    """What an instance says that it serves."""

    instance: Instance
    name: str


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_DECODER = msgspec.msgpack.Decoder(Opened | Lost | Doubt | Frames | Model)


class LinkOffice:
    """The owner's half: passes on what comes in on the streams."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._next = 0
        self._open: dict[int, Instance] = {}
        self._models: dict[object, tuple[Instance, str]] = {}
        self._owners: dict[bytes, int | None] = {}

    def number(self) -> int:
        """A number for a stream."""
        self._next += 1
        return self._next

    def opened(self, number: int, instance: Instance) -> None:
        """Tell everybody that requests may go there."""
        self._open[number] = instance
        self._say(None, Opened(number, instance))

    def lost(self, number: int, reason: str) -> None:
        """Tell everybody that its requests have failed."""
        if self._open.pop(number, None) is not None:
            self._say(None, Lost(number, reason))

    def doubt(self, number: int, kind: Kind) -> None:
        """Tell everybody that a message has lost its id; see Boxes.doubt."""
        self._say(None, Doubt(number, _NUMBERS[kind]))

    def pass_on(self, number: int, frames: list[Frame]) -> list[Frame]:
        """Send messages to the processes whose they are; returns those that name no process. Hot."""
        batches: dict[int, list[tuple[bytes, int, bytes]]] = {}
        left: list[Frame] = []
        owners = self._owners
        for frame in frames:
            rid, kind, body = frame
            worker = owners[rid] if rid in owners else self._owner(rid)
            if worker is None:
                left.append(frame)
                continue
            # looking a kind up calls its hash, which is slow for an enumeration
            coded = (rid, _DATA if kind is Kind.DATA else _NUMBERS[kind], body)
            batch = batches.get(worker)
            if batch is None:
                batches[worker] = [coded]
            else:
                batch.append(coded)
        for worker, batch in batches.items():
            self._say(worker, Frames(number, batch))
        return left

    def serves(self, instance: Instance, name: str) -> None:
        """Tell everybody an instance's model name, where it is another one than before."""
        known = self._models.get(instance.key)
        if known is None or known[1] != name:
            self._models[instance.key] = (instance, name)
            self._say(None, Model(instance, name))

    def forget(self, instance: Instance) -> None:
        """An instance is gone."""
        self._models.pop(instance.key, None)

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started what the others know."""
        for number, instance in self._open.items():
            self._say(worker, Opened(number, instance))
        for instance, name in self._models.values():
            self._say(worker, Model(instance, name))

    def _owner(self, rid: bytes) -> int | None:
        if len(self._owners) >= MAX_KNOWN_IDS:
            self._owners.clear()
        worker = self._owners[rid] = worker_of(rid)
        return worker

    def _say(self, worker: int | None, word: _Word) -> None:
        self._tell(worker, _ENCODER.encode(word))


class RemoteLink:
    """A serving process's half of one stream: its messages come from the owner.

    Attributes:
        boxes: the requests that wait for them.
        up: whether the stream is open.
    """

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.up = True


class Listener(Protocol):
    """Who wants to know what comes in beside the messages of live requests."""

    def learn(self, instance: Instance, name: str) -> None:
        """An instance says what it serves."""
        ...

    def stray(self, instance: Instance, wire_id: bytes) -> None:
        """A message came for a request that is not there."""
        ...


class RemoteLinks:
    """All streams as a serving process sees them, by the keys of their instances.

    Args:
        on_late: called for each message whose request is not there; see Boxes.late.
    """

    def __init__(self, log: logging.Logger, listener: Listener, *, on_late: Callable[[], None]) -> None:
        self._log = log
        self._listener = listener
        self._on_late = on_late
        self._by_number: dict[int, RemoteLink] = {}
        self.by_key: dict[object, RemoteLink] = {}

    def told(self, data: bytes, now_s: float) -> None:
        """Take a message of the owner; hot."""
        word = _DECODER.decode(data)
        if isinstance(word, Frames):
            link = self._by_number.get(word.number)
            if link is not None:
                frames = [(rid, _KINDS[kind], body) for rid, kind, body in word.frames]
                for rid, _, body in link.boxes.deliver(frames, now_s):
                    link.boxes.late(body)
                    self._listener.stray(link.boxes.instance, rid)
        elif isinstance(word, Opened):
            link = RemoteLink(Boxes(word.instance, self._log, on_late=self._on_late))
            self._by_number[word.number] = self.by_key[word.instance.key] = link
        elif isinstance(word, Lost):
            self._lose(word)
        elif isinstance(word, Doubt):
            if (link := self._by_number.get(word.number)) is not None:
                link.boxes.doubt(_KINDS[word.kind])
        else:
            self._listener.learn(word.instance, word.name)

    def _lose(self, word: Lost) -> None:
        link = self._by_number.pop(word.number, None)
        if link is None:
            return
        link.up = False
        if self.by_key.get(link.boxes.instance.key) is link:
            del self.by_key[link.boxes.instance.key]
        link.boxes.lose(word.reason)
