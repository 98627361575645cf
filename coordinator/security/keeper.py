"""Reads the keys, at the start and whenever they change, and hands them to the guards."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from coordinator.config import ApiKey, Auth, ConfigError
from coordinator.security.keys import Key
from coordinator.security.places import KeyPlaces, data_keys, management_keys

LOG = logging.getLogger("pd_coordinator.security")

Take = Callable[[Sequence[Key] | None], None]


class KeyKeeper:
    """The keys of both planes.

    Args:
        data: takes the keys of the data plane; None: none is needed.
        management: the same for the management plane.
        forget: is told the name of each key of the data plane that is gone.
    """

    def __init__(self, data: Take, management: Take, forget: Callable[[str], None]) -> None:
        self._data = data
        self._management = management
        self._forget = forget
        self._places = KeyPlaces()
        self._auth = Auth()
        self.keys: tuple[Key, ...] | None = None
        self._management_on = False

    def apply(self, auth: Auth) -> None:
        """Go by these settings; raises ConfigError, and nothing has changed."""
        self.prepare(auth)()

    def prepare(self, auth: Auth) -> Callable[[], None]:
        """Read the keys that these settings name; the result, when called, goes by them.

        A port that needs a key needs one until the process ends, whatever comes.

        Raises:
            ConfigError: a file with keys cannot be used.
        """
        return partial(self._go_by, auth, data_keys(auth), management_keys(auth))

    def _go_by(self, auth: Auth, given: Sequence[ApiKey] | None, managing: Sequence[Key] | None) -> None:
        self._auth = auth
        if given is None and self.keys is not None:
            LOG.warning("auth has no keys any more: nobody may call; from the next start everybody may")
            given = ()
        if managing is None and self._management_on:
            LOG.warning("auth has no management keys any more: nobody may manage; from the next start everybody may")
            managing = ()
        self._management_on = managing is not None
        before = {key.name for key in self.keys or ()}
        self.keys = None if given is None else self._places.place(given)
        self._data(self.keys)
        self._management(managing)
        for name in sorted(before - {key.name for key in self.keys or ()}):
            self._forget(name)

    def files(self) -> Iterator[str]:
        """The files that hold keys."""
        yield from filter(None, (self._auth.keys_file, self._auth.management_keys_file))

    def reread(self) -> None:
        """Read the files again; one that cannot be used changes nothing and is told in the log."""
        try:
            self.apply(self._auth)
        except ConfigError as error:
            LOG.error("keys not read again, those before stay valid: %s", error)
            return
        LOG.info("keys read again: %s may call", _count(self.keys))


def _count(keys: Sequence[Key] | None) -> str:
    return "everybody" if keys is None else f"{len(keys)} keys"
