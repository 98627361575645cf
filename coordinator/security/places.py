"""From the configuration's keys to what the guards of all processes go by."""

from collections.abc import Sequence

from coordinator.config import ApiKey, Auth, ManagementKey, read_keys
from coordinator.security.keys import Key, split_hash
from coordinator.security.uses import SLOTS


class KeyPlaces:
    """Gives each key of the data plane a place in the table of uses, which it keeps while it is there."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, keys: Sequence[ApiKey]) -> tuple[Key, ...]:
        """The keys with their places; there are no more than `SLOTS`, the configuration sees to that."""
        names = {key.name for key in keys}
        self._places = {name: slot for name, slot in self._places.items() if name in names}
        free = (slot for slot in range(SLOTS) if slot not in set(self._places.values()))
        for key, slot in zip([key for key in keys if key.name not in self._places], list(free), strict=False):
            self._places[key.name] = slot
        return tuple(_key(self._places[key.name], key) for key in keys)


def data_keys(auth: Auth) -> tuple[ApiKey, ...] | None:
    """The keys of the data plane, those of the file included; None: none is needed. Raises ConfigError."""
    if not auth.keys and auth.keys_file is None:
        return None
    return (*auth.keys, *(read_keys(auth.keys_file, ApiKey, auth.keys) if auth.keys_file else ()))


def management_keys(auth: Auth) -> tuple[Key, ...] | None:
    """The same for the management plane."""
    if not auth.management_keys and auth.management_keys_file is None:
        return None
    file = auth.management_keys_file
    given = (*auth.management_keys, *(read_keys(file, ManagementKey, auth.management_keys) if file else ()))
    return tuple(_key(0, key) for key in given)


def _key(slot: int, given: ManagementKey) -> Key:
    salt, digest = split_hash(given.hash)
    if isinstance(given, ApiKey):
        return Key(slot, given.name, digest, salt, given.requests_per_minute, given.max_in_flight)
    return Key(slot, given.name, digest, salt)
