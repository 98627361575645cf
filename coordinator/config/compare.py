"""Two configurations side by side, and one as it may be shown: what has changed, what needs a restart, no secrets."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .checks import restart_keys
from .errors import KeyPath, dotted
from .models import Settings

MASK = "***"
PORTS = ("data", "management")  # of the section tls
_INSTANCES: KeyPath = ("cluster", "instances")
# names of values nobody may read; those of files and variables that hold one (key_file, engine_key_env) are no secrets
_SECRET = re.compile(
    r"(^|_)(hash|key|token|secret|password|passwd|credentials?|authorization|headers?|cookie)$", re.IGNORECASE
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


class Change(NamedTuple):
    """A key whose value is another one; secrets are masked, so that both may look the same."""

    path: str
    old: object
    new: object


def shown_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain data with every default filled in; secrets are masked, also those in unknown keys."""
    data: dict[str, Any] = _masked(settings.model_dump(mode="json"), hidden=False)
    return data


def changes(old: Settings, new: Settings) -> tuple[Change, ...]:
    """Keys that differ, in the order of the file; instances are left out, they have names of their own."""
    found: list[Change] = []
    for path, before, after in _differences((), old.model_dump(mode="json"), new.model_dump(mode="json")):
        hidden = any(isinstance(step, str) and _SECRET.search(step) for step in path)
        if path != _INSTANCES:
            found.append(Change(dotted(path), _masked(before, hidden=hidden), _masked(after, hidden=hidden)))
    return tuple(found)


def as_running(running: Settings, read: Settings) -> tuple[Settings, tuple[str, ...]]:
    """What was read, but with what only a start can change as it is in `running`; and the keys that wait for one.

    These are addresses and ports of ours, the number of processes, and whether a port has TLS.
    """
    waiting = restart_keys(running, read)
    kept = {key.removeprefix("server."): None for key in waiting}
    server = read.server.model_copy(update={name: getattr(running.server, name) for name in kept})
    ports = [
        name for name in PORTS
        if (getattr(running.tls, name).cert_file is None) is not (getattr(read.tls, name).cert_file is None)
    ]  # fmt: skip
    tls = read.tls.model_copy(update={name: getattr(running.tls, name) for name in ports})
    settings = read.model_copy(update={"server": server, "tls": tls}) if kept or ports else read
    return settings, (*waiting, *(f"tls.{name}" for name in ports))


def _differences(path: KeyPath, old: Any, new: Any) -> Iterator[tuple[KeyPath, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in (*new, *(key for key in old if key not in new)):
            yield from _differences((*path, key), old.get(key), new.get(key))
    elif old is None and isinstance(new, Mapping) and path[:1] == ("engines",) and len(path) == 2:
        yield from _differences(path, {}, new)
    elif old != new:
        yield path, old, new


def _masked(value: Any, *, hidden: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(item, hidden=hidden or bool(_SECRET.search(str(key)))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, hidden=hidden) for item in value]
    if isinstance(value, str):
        return MASK if hidden and value else _LOGIN.sub(f"{MASK}@", value)
    return MASK if hidden and isinstance(value, (int, float)) and not isinstance(value, bool) else value
