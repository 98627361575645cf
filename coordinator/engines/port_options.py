"""Keys of an engine's instances that are port numbers, where there are no others."""

from collections.abc import Mapping, Sequence

from coordinator.config.errors import OptionError

MAX_PORT = 65535


def port_options(given: Mapping[str, object], known: Sequence[str]) -> Mapping[str, object]:
    """Validate the keys of an instance, each a port; raises OptionError."""
    for key, value in given.items():
        if key not in known:
            raise OptionError(key, "unknown key", known)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PORT:
            raise OptionError(key, f"must be a port number, 1 to {MAX_PORT}", known)
    return dict(given)
