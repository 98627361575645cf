"""Who may use the data plane, and how much."""

from collections.abc import Sequence

from coordinator.security.keys import Key, Keyring, RawHeaders
from coordinator.security.uses import KeyUses, own_words


class Guard:
    """Lets everybody in until it is given keys; from then on those alone.

    Args:
        uses: see `Attributes`; None: some of its own.

    Attributes:
        on: whether a key is needed.
        uses: says how much a key may be used.
    """

    def __init__(self, uses: KeyUses | None = None) -> None:
        self.on = False
        self.uses = uses or KeyUses(own_words())
        self._ring = Keyring(())
        self._keys: dict[int, Key] = {}

    def take(self, keys: Sequence[Key] | None) -> None:
        """Take these keys in place of those before; requests that run go on. None: nobody needs one."""
        self.on = keys is not None
        self._ring = Keyring(keys or ())
        self._keys = {key.slot: key for key in keys or ()}
        self.uses.assign({key.name: key.slot for key in keys or ()})

    def find(self, headers: RawHeaders, found: Key | None = None) -> Key | None:
        """The key of a request; None where none is needed. Hot.

        Args:
            headers: names in lower case.
            found: what this gave for the same headers a while ago; it counts if the keys are still the same.

        Raises:
            InvalidKey: it has none, or a wrong one.
        """
        if not self.on:
            return None
        if found is not None and self._keys.get(found.slot) is found:
            return found
        return self._ring.find(headers)
