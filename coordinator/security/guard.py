"""Who may use the data plane, and how much."""

from collections.abc import Sequence

from coordinator.security.keys import Key, Keyring, RawHeaders
from coordinator.security.uses import KeyUses, own_words


class Guard:
    """Lets everybody in until it is given keys; from then on those alone.

    Args:
        uses: counts what keys are used for.

    Attributes:
        on: whether a key is needed.
    """

    def __init__(self, uses: KeyUses | None = None) -> None:
        self.on = False
        self._uses = uses or KeyUses(own_words())
        self._ring = Keyring(())

    def take(self, keys: Sequence[Key] | None) -> None:
        """Take these keys in place of those before; requests that run go on. None: nobody needs one."""
        self.on = keys is not None
        self._ring = Keyring(keys or ())
        self._uses.assign({key.name: key.slot for key in keys or ()})

    def find(self, headers: RawHeaders) -> Key | None:
        """The key of a request; None where none is needed. Raises InvalidKey."""
        return self._ring.find(headers) if self.on else None

    def admit(self, key: Key) -> object:
        """See `KeyUses.admit`."""
        return self._uses.admit(key)

    def release(self, use: object) -> None:
        """See `KeyUses.release`."""
        self._uses.release(use)
