"""From labels and annotations to the keys of an instance."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from coordinator.config import KubernetesSource
from coordinator.config.instances import GENERIC_KEYS

from .objects import Meta

FindPort = Callable[[str], int | None]
"""The number of a port by its name."""


def keys_of(meta: Meta, host: str, find_port: FindPort, given: KubernetesSource) -> dict[str, object]:
    """The keys of the instance at `host`, as in the configuration file.

    What an object says about itself goes before what the settings say for all; a label goes before an annotation.

    Raises:
        ValueError: something is missing or makes no sense, in a sentence.
    """
    said = {name: value for name in ("engine", "model", "group") if (value := _said(meta, _label(given, name)))}
    role = _said(meta, given.role_label) or given.role
    if not role:
        raise ValueError(f"it has no role: no label or annotation {given.role_label}, and none is set")
    port = _port(_said(meta, given.port_label) or given.port, find_port)
    bare = f"[{host}]" if ":" in host else host
    url = f"{given.scheme}://{bare}:{port}"
    return {**given.traits(), **_options(_said(meta, given.options_label)), **said, "role": str(role), "url": url}


def _label(given: KubernetesSource, name: str) -> str | None:
    label: str | None = getattr(given, f"{name}_label")
    return label


def _said(meta: Meta, name: str | None) -> str:
    if name is None:
        return ""
    return ((meta.labels or {}).get(name) or (meta.annotations or {}).get(name) or "").strip()


def _port(wanted: str | int | None, find_port: FindPort) -> int:
    if wanted is None:
        raise ValueError("it has no port: none is said, and none is set")
    if isinstance(wanted, int):
        return wanted
    if wanted.isascii() and wanted.isdigit() and len(wanted) <= 5:
        return int(wanted)
    found = find_port(wanted)
    if found is None:
        raise ValueError(f"it has no port of the name {wanted[:64]!r}")
    return found


def _options(text: str) -> Mapping[str, Any]:
    """Keys of the engine. Others are refused: who may write annotations may not choose names, files or secrets."""
    if not text:
        return {}
    try:
        options = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its options are no JSON object: {error}") from None
    for key in options:
        if key in GENERIC_KEYS:
            raise ValueError(f"its options may hold keys of its engine only, not {key!r}")
    return options
