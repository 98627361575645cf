"""One owner for server, links and etcd when several processes serve (`server.workers`).

Instances call one address. The supervisor answers them and passes results on to the process whose number stands in the
upper bits of their request id, all of one call in one message. It answers before that process has seen them: what is no
longer wanted there is told back, and the next result of the same request is answered accordingly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from coordinator.core.ids import worker_of
from coordinator.core.instance import Instance
from coordinator.engines.xllm.boxes import Boxes
from coordinator.engines.xllm.registry import Beat
from coordinator.wire.packing import plain

if TYPE_CHECKING:
    from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGeneration

Tell = Callable[[int | None, bytes], None]
"""Send bytes to the other half in one worker, or in all of them (None)."""

MAX_OVER = 65536  # requests that are remembered to be over


class _Word(msgspec.Struct, array_like=True, tag=True):
    """A message between the halves."""


# --- to workers


class Address(_Word):
    """Where instances reach us."""

    service: str


class Results(_Word):
    """DisaggStreamGenerations, packed, and the name of who sent them."""

    data: bytes
    sender: str


class Lost(_Word):
    """An instance, by its id, has lost what it worked on."""

    instance: str
    why: str


class Model(_Word):
    """What an instance says that it serves."""

    instance: Instance
    name: str


class Beaten(_Word):
    """A heartbeat."""

    beat: Beat


# --- from workers


class Over(_Word):
    """These requests are not wanted any more."""

    ids: list[str]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_DOWN = msgspec.msgpack.Decoder(Address | Results | Lost | Model | Beaten)
_UP = msgspec.msgpack.Decoder(Over)


class Office:
    """The owner's half.

    Args:
        on_late: called for each result that no process waits for.
    """

    def __init__(self, tell: Tell, *, on_late: Callable[[], None]) -> None:
        self._tell = tell
        self._on_late = on_late
        self._over: dict[str, None] = {}
        self._models: dict[object, Model] = {}
        self._service = ""

    def deliver(self, results: "Iterable[DisaggStreamGeneration]", now_s: float, sender: str) -> list[bool]:  # noqa: ARG002
        """Pass results on; returns for each whether its request goes on, as far as is known here. Hot."""
        from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGenerations  # noqa: PLC0415  # see inbound

        batches: dict[int, DisaggStreamGenerations] = {}
        wanted: list[bool] = []
        for told in results:
            wire_id = told.service_req_id
            worker = worker_of(wire_id.encode())
            if worker is None or wire_id in self._over:
                self._on_late()
                wanted.append(False)
                continue
            batch = batches.get(worker)
            if batch is None:
                batch = batches[worker] = DisaggStreamGenerations()
            batch.gens.append(told)
            wanted.append(True)
            if told.finished or told.gen_status.status_code:
                self._end(wire_id)
        for worker, batch in batches.items():
            self._say(worker, Results(batch.SerializeToString(), sender))
        return wanted

    def heard(self, data: bytes) -> None:
        """Take a message of a serving half."""
        for wire_id in _UP.decode(data).ids:
            self._end(wire_id)

    def opened(self, service: str) -> None:
        """The server listens."""
        self._service = service
        self._say(None, Address(service))

    def lost(self, instance_id: str, why: str) -> None:
        """An instance has lost what it worked on."""
        self._say(None, Lost(instance_id, why))

    def serves(self, instance: Instance, name: str) -> None:
        """Tell everybody an instance's model name, where it is another one than before."""
        known = self._models.get(instance.key)
        if known is None or known.name != name:
            self._models[instance.key] = word = Model(instance, name)
            self._say(None, word)

    def beaten(self, beat: Beat) -> None:
        """A heartbeat came."""
        self._say(None, Beaten(beat))

    def forget(self, instance: Instance) -> None:
        """An instance is gone."""
        self._models.pop(instance.key, None)

    def introduce(self, worker: int) -> None:
        """Tell a process that has just started what the others know."""
        self._say(worker, Address(self._service))
        for word in self._models.values():
            self._say(worker, word)

    def _end(self, wire_id: str) -> None:
        if len(self._over) >= MAX_OVER:
            del self._over[next(iter(self._over))]
        self._over[wire_id] = None

    def _say(self, worker: int | None, word: _Word) -> None:
        self._tell(worker, _ENCODER.encode(word))


class Serving:
    """A serving process's half.

    Args:
        boxes: the requests of this process.
        learn: told the model names of instances.
        heard: told heartbeats.

    Attributes:
        service: where instances reach the owner; empty until it is known.
        say: sends bytes to the owner.
    """

    def __init__(
        self,
        boxes: Boxes,
        log: logging.Logger,
        *,
        learn: Callable[[Instance, str], None],
        heard: Callable[[Beat], None],
    ) -> None:
        self._boxes = boxes
        self._log = log
        self._learn = learn
        self._heard = heard
        self.service = ""
        self.say: Callable[[bytes], None] | None = None

    def told(self, data: bytes) -> None:
        """Take a message of the owner; hot."""
        word = _DOWN.decode(data)
        if isinstance(word, Results):
            self._deliver(word.data, word.sender)
        elif isinstance(word, Beaten):
            self._heard(word.beat)
        elif isinstance(word, Address):
            self.service = word.service
        elif isinstance(word, Lost):
            self._boxes.lose(word.instance, word.why)
        else:
            self._learn(word.instance, word.name)

    def over(self, *wire_ids: str) -> None:
        """Requests are not wanted any more, before their end."""
        if self.say is not None:
            self.say(_ENCODER.encode(Over(list(wire_ids))))

    def _deliver(self, data: bytes, sender: str) -> None:
        from coordinator.wire.protobuf.xllm_pb2 import DisaggStreamGenerations  # noqa: PLC0415  # see inbound

        results = DisaggStreamGenerations.FromString(data).gens
        wanted = self._boxes.deliver(results, time.monotonic(), sender)
        if not all(wanted):
            unwanted = {one.service_req_id for one, goes_on in zip(results, wanted, strict=True) if not goes_on}
            self.over(*unwanted)
