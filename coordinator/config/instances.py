"""From the file's instance entries to `core.instance.Instance`: ids, addresses, options checked by their engine."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from coordinator.core.instance import Capacity, Instance

from .address import parse_url
from .errors import ConfigError, Finding, KeyPath, OptionError, Refusal, did_you_mean
from .explain import explain, unknown_key
from .models import InstanceSettings, Settings

ValidateOptions = Callable[[str, Mapping[str, object]], Mapping[str, object]]
"""Checks engine-specific keys: (engine name, keys as given) to keys as the engine wants them.

Raises OptionError, or any other ValueError with a sentence that names the key.
"""

GENERIC_KEYS = tuple(InstanceSettings.model_fields)
FROM_FILE_ALONE = ("ca_file", "cert_file", "key_file", "engine_key_env", "engine_key_file")
"""Keys that name what only whoever writes the configuration file may read."""
NEW_CODE = "only the configuration file may name code to load; this one is not named there"
_TLS_KEYS = ("ca_file", "cert_file", "key_file", "server_name")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Shared:
    """What instances have in common; `engine` None: unknown, so instances that rely on it cannot be built."""

    engine: str | None
    model: str | None


def to_instances(settings: Settings, validate: ValidateOptions) -> tuple[Instance, ...]:
    """The instances of `cluster.instances`, in order.

    Raises:
        ConfigError: an engine refuses keys of its instances; every such key, with its line in the file.
    """
    shared = Shared(settings.cluster.engine, settings.cluster.model)
    entries = list(enumerate(settings.cluster.instances))
    built, findings = build_all(entries, shared, validate)
    if findings:
        source = settings.source
        raise ConfigError(source.name, [finding.located(source.lines) for finding in findings])
    return tuple(built)


def instance_from_mapping(mapping: object, settings: Settings, validate: ValidateOptions) -> Instance:
    """An instance from the body of `POST /v1/instances`: the same keys and defaults as in the file.

    Raises:
        ValueError: all that is wrong, in one sentence each, with the nearest valid key for a mistyped one.
    """
    if not isinstance(mapping, Mapping):
        raise Refusal("an instance must be a mapping with at least the keys role and url")
    if not all(isinstance(key, str) for key in mapping):
        raise Refusal("keys must be text")
    for key in FROM_FILE_ALONE:
        if mapping.get(key) is not None:
            raise Refusal(f"{key}: can be set in the configuration file alone")
    try:
        entry = InstanceSettings.model_validate(dict(mapping), context=settings.source.known)
    except ValidationError as error:
        raise ValueError(_sentence(explain(error, mapping, InstanceSettings))) from None
    if names_new_code(entry, settings):
        raise Refusal(f"engine: {NEW_CODE}")
    shared = Shared(settings.cluster.engine, settings.cluster.model)
    built, findings = build_all([(0, entry)], shared, validate)
    if findings:
        raise ValueError(_sentence(Finding(found.path[3:], found.reason, found.hint) for found in findings))
    return built[0]


def names_new_code(entry: InstanceSettings, settings: Settings) -> bool:
    """Whether an instance from elsewhere wants an engine that is code and that the configuration does not name."""
    named = {settings.cluster.engine, *settings.engines}
    named |= {one.engine for one in settings.cluster.instances if one.engine}
    named |= {source.engine for source in settings.discovery.traits if source.engine}
    return entry.engine is not None and ":" in entry.engine and entry.engine not in named


def build_all(
    entries: Iterable[tuple[int, InstanceSettings]], shared: Shared, validate: ValidateOptions
) -> tuple[list[Instance], list[Finding]]:
    """Build what can be built of the entries (with their positions in the file's list), and say what cannot."""
    built: list[Instance] = []
    findings: list[Finding] = []
    for position, entry in entries:
        engine = entry.engine or shared.engine
        if engine is None:
            continue
        try:
            options = validate(engine, entry.options)
        except ValueError as error:
            findings.append(refused(error, ("cluster", "instances", position), entry.options, GENERIC_KEYS))
            continue
        built.append(_instance(entry, engine, entry.model or shared.model, options))
    return built, findings


def identifier(entry: InstanceSettings) -> str:
    """The instance's id: as given, else `<role>-<host>:<port>` (an IPv6 host in brackets)."""
    return entry.id or f"{entry.role}-{parse_url(entry.url).netloc}"


def _instance(entry: InstanceSettings, engine: str, model: str | None, options: Mapping[str, object]) -> Instance:
    own = {name: value for name in ("tokenizer", *_TLS_KEYS) if (value := getattr(entry, name)) is not None}
    if own:
        options = {**options, **own}
    return Instance(
        id=identifier(entry),
        role=entry.role,
        address=parse_url(entry.url),
        engine=engine,
        model=model,
        group=entry.group,
        capacity=Capacity(max_requests=entry.max_requests),
        options=options,
    )


def refused(error: ValueError, path: KeyPath, given: Mapping[str, Any], also_valid: tuple[str, ...] = ()) -> Finding:
    """The finding for what an engine said about its keys in the mapping at `path`."""
    if not isinstance(error, OptionError):
        reason = " ".join(str(error).split()) or "the engine refuses its keys"
        key = next((word for word in _WORD.findall(reason) if word in given), None)
        hint = did_you_mean(key, also_valid) if key else None
        return Finding((*path, key) if key else path, reason, hint)
    if error.valid and error.key not in error.valid:
        return unknown_key((*path, error.key), (*also_valid, *error.valid))
    hint = None if error.key in error.valid else did_you_mean(error.key, also_valid)
    return Finding((*path, error.key), error.reason, hint)


def _sentence(findings: Iterable[Finding]) -> str:
    return "; ".join(finding.located({}).text() for finding in findings)
