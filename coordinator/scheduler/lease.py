"""Where one attempt runs, and the load that it holds there."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from coordinator.core.errors import EngineFailed
from coordinator.core.instance import Instance, Role

from .load import Load, Share


class Keeper(Protocol):
    """Who gave the lease out and is told of what it gives back."""

    def settle(self, load: Load) -> None:
        """The load has changed."""
        ...

    def ended(self, lease: "Lease") -> None:
        """The lease holds nothing any more."""
        ...

    def alike(self, lease: "Lease", role: Role) -> list[tuple[Instance, int]]:
        """Who in the view could have a role in this lease, with the requests on each; best first."""
        ...

    def share_like(self, share: Share, instance: Instance) -> Share | None:
        """The same part of the load on another instance; None: it is not in the view, or the part was given back."""
        ...


class Lease:
    """A placement (`core.ports.Placement`) that holds load on its instances until its scope is left.

    Prefill's share ends with `prefilled` or `skip_prefill`; from `prefilled` until `decoding` its KV is counted as
    pinned; decode's share ends with the scope. Each happens once, in whatever order the calls come; after the end calls
    do nothing. A hybrid instance has one share, for the whole time.

    Attributes:
        prefill: the prefill instance, or the hybrid one.
        decode: the decode instance, or the hybrid one.
        wire_ids: the ids under which the request went out to prefill.
        placed_s: monotonic time (seconds) of the placement.
        sent_s: of the first call to prefill; None until then, like all that follow.
        prefilled_s: of prefill's answer.
        decoding_s: of decode's first output.
        ended_s: of the end.
        mover: puts the decode half elsewhere (`Scheduler.move_decode`) and accounts for it; None: nobody does.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_decode_share",
        "_keeper",
        "_pinned",
        "_prefill_share",
        "_skipped",
        "decode",
        "decoding_s",
        "ended_s",
        "mover",
        "placed_s",
        "prefill",
        "prefilled_s",
        "sent_s",
        "wire_ids",
    )

    def __init__(self, prefill: Share | None, decode: Share, keeper: Keeper, clock: Callable[[], float]) -> None:
        """Args: `prefill` is None for a hybrid instance; `keeper` has the shares' loads settled already."""
        self._prefill_share = prefill
        self._decode_share = decode
        self._keeper = keeper
        self._clock = clock
        self._pinned = False
        self._skipped = False
        self.decode: Instance = decode.load.instance
        self.prefill: Instance = self.decode if prefill is None else prefill.load.instance
        self.wire_ids: list[str] = []
        self.placed_s = clock()
        self.sent_s: float | None = None
        self.prefilled_s: float | None = None
        self.decoding_s: float | None = None
        self.ended_s: float | None = None
        self.mover: Callable[[EngineFailed], bool] | None = None

    def prefill_sent(self, wire_id: str) -> None:
        """See `core.ports.Stages`."""
        if self.ended_s is not None:
            return
        self.wire_ids.append(wire_id)
        if self.sent_s is None:
            self.sent_s = self._clock()

    def skip_prefill(self) -> None:
        """See `core.ports.Placement`. Gives prefill's share back; a hybrid instance keeps its only one."""
        share = self._prefill_share
        if share is None or self.ended_s is not None or self.prefilled_s is not None:
            return
        self._skipped = True
        if share.give_back():
            self._keeper.settle(share.load)

    def candidates(self, role: Role) -> list[tuple[Instance, int]]:
        """See `core.ports.Placement`."""
        return self._keeper.alike(self, role)

    def hand_to(self, instance: Instance) -> bool:
        """See `core.ports.Placement`."""
        is_prefill = instance.role is Role.PREFILL
        old = self._prefill_share if is_prefill else self._decode_share
        if old is None or self.ended_s is not None or instance.role is Role.HYBRID:
            return False
        if instance.key == old.load.instance.key:
            return True
        share = self._keeper.share_like(old, instance)
        if share is None:
            return False
        if not is_prefill:
            self.move(share)
            return True
        self._prefill_share = share
        self.prefill = share.load.instance
        old.give_back()
        self._keeper.settle(old.load)
        return True

    def another_decode(self, failure: EngineFailed) -> bool:
        """See `core.ports.Placement`."""
        return self.mover is not None and self.ended_s is None and self.mover(failure)

    def move(self, decode: Share) -> None:
        """Exchange decode's share; the old one is given back. Not for a hybrid instance."""
        old, self._decode_share = self._decode_share, decode
        self.decode = decode.load.instance
        if old.give_back():
            self._keeper.settle(old.load)

    def prefilled(self, now_s: float, *, pinned: bool = True) -> None:
        """See `core.ports.Stages`. Gives prefill's share back."""
        if self._skipped or self.ended_s is not None or self.prefilled_s is not None:
            return
        self.prefilled_s = now_s
        share = self._prefill_share
        if share is not None:
            share.give_back()
            if pinned and self.decoding_s is None:
                self._pinned = True
                share.load.pinned += 1
            self._keeper.settle(share.load)

    def decoding(self, now_s: float) -> None:
        """See `core.ports.Stages`. Unpins prefill's KV."""
        if self.ended_s is not None or self.decoding_s is not None:
            return
        self.decoding_s = now_s
        if self._pinned and self._prefill_share is not None:
            self._unpin(self._prefill_share.load)
            self._keeper.settle(self._prefill_share.load)

    def end(self) -> None:
        """Give back whatever is still held."""
        if self.ended_s is not None:
            return
        self.ended_s = self._clock()
        prefill, decode = self._prefill_share, self._decode_share
        decode.give_back()
        if prefill is None:
            self._keeper.ended(self)
            self._keeper.settle(decode.load)
            return
        changed = prefill.give_back()
        if self._pinned:
            self._unpin(prefill.load)
            changed = True
        self._keeper.ended(self)
        try:
            if changed:
                self._keeper.settle(prefill.load)
        finally:
            self._keeper.settle(decode.load)

    def _unpin(self, load: Load) -> None:
        self._pinned = False
        load.pinned -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
