"""cluster.yaml to `Settings`: read, validate, and tell everything that is wrong in one go."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .checks import check_instances, check_ports
from .document import Document, read_document, read_text
from .errors import ConfigError, Finding, KeyPath
from .explain import explain
from .fields import located_engine
from .instances import Shared, ValidateOptions, build_all, refused
from .models import InstanceSettings, Server, Settings
from .source import Known, Source

Model = TypeVar("Model", bound=BaseModel)


def load(
    path: Path,
    known: Known | None = None,
    validate: ValidateOptions | None = None,
    validate_engine: ValidateOptions | None = None,
) -> Settings:
    """Read a configuration file.

    Args:
        path: the file; messages name it in just this way.
        known: names of engines and policies that are offered; None: the built-in engines, any policy name.
        validate: checks engine-specific keys, so that problems with them are told together with all others; None:
            `to_instances` tells them.
        validate_engine: the same for the settings of an engine protocol, in the section `engines`.

    Raises:
        ConfigError: the file cannot be read or used; holds every problem.
    """
    return parse(read_text(path), str(path), known, validate, validate_engine)


def parse(
    text: str,
    name: str = "cluster.yaml",
    known: Known | None = None,
    validate: ValidateOptions | None = None,
    validate_engine: ValidateOptions | None = None,
) -> Settings:
    """The same for text that is already there; `name` stands for the file in messages and as the start of paths."""
    document = read_document(text, name)
    reading = _Reading(document, replace(known or Known(), folder=Path(name).parent))
    settings, findings = reading.validated()
    findings += reading.crossed(findings, validate)
    if settings is not None and validate_engine is not None:
        findings += _refused_engines(settings.engines, validate_engine)
    if settings is None or findings:
        raise ConfigError(name, [finding.located(document.lines) for finding in findings])
    return settings.with_source(Source(name, document.lines, reading.known))


def _refused_engines(engines: Mapping[str, Mapping[str, Any]], validate: ValidateOptions) -> Iterator[Finding]:
    for name, given in engines.items():
        try:
            validate(name, given)
        except ValueError as error:
            yield refused(error, ("engines", name), given)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One document on its way to settings."""

    document: Document
    known: Known

    def validated(self) -> tuple[Settings | None, list[Finding]]:
        """The settings if the models accept them, and what the document and the models find wrong."""
        findings = list(self.document.findings)
        try:
            return Settings.model_validate(self.document.data, context=self.known), findings
        except ValidationError as error:
            found = explain(error, self.document.data, Settings)
            return None, findings + [finding for finding in found if not self._is_unread(finding.path)]

    def crossed(self, found: list[Finding], validate: ValidateOptions | None) -> list[Finding]:
        """What is wrong between keys, as far as the values themselves are right."""
        findings: list[Finding] = []
        if server := self._valid(Server, self.document.data.get("server")):
            findings += check_ports(server)
        entries = list(self._entries())
        findings += check_instances(entries, self.document.lines)
        if validate is not None:
            engine_is_wrong = any(finding.path == ("cluster", "engine") for finding in found)
            findings += build_all(entries, Shared(None if engine_is_wrong else self._engine(), None), validate)[1]
        return [finding for finding in findings if not self._is_unread(finding.path)]

    def _engine(self) -> str:
        cluster = self.document.data.get("cluster")
        engine = cluster.get("engine", Settings().cluster.engine) if isinstance(cluster, dict) else None
        return located_engine(engine, self.known) if isinstance(engine, str) else Settings().cluster.engine

    def _entries(self) -> Iterator[tuple[int, InstanceSettings]]:
        """The instance entries that are valid by themselves, with their positions."""
        cluster = self.document.data.get("cluster")
        items = cluster.get("instances") if isinstance(cluster, dict) else None
        for position, item in enumerate(items if isinstance(items, list) else ()):
            if entry := self._valid(InstanceSettings, item):
                yield position, entry

    def _valid(self, model: type[Model], value: Any) -> Model | None:
        try:
            return model.model_validate(value, context=self.known)
        except ValidationError:
            return None

    def _is_unread(self, path: KeyPath) -> bool:
        return any(path[:size] in self.document.unread for size in range(1, len(path) + 1))
