"""Files that hold instances and nothing else, for `discovery.files`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from coordinator.core.instance import Instance

from .checks import check_instances
from .document import read_document, read_text
from .errors import ConfigError, Finding
from .explain import explain
from .instances import NEW_CODE, Shared, ValidateOptions, build_all, names_new_code
from .models import InstanceSettings, Settings
from .section import Section

LIST = "instances"
_ABOVE = ("cluster",)  # what stands above the list in the configuration file


class _InstanceFile(Section):
    instances: Annotated[tuple[InstanceSettings, ...], Field(strict=False)]


def read_instances(name: str, settings: Settings, validate: ValidateOptions) -> tuple[Instance, ...]:
    """The instances of a YAML or JSON file: a list, or a mapping with a list below `instances`.

    Their keys and what they have in common are those of `cluster.instances`; relative paths begin at the file's folder.
    An empty file is refused, for it may be one that is being written; `[]` says that there are none.

    Raises:
        ConfigError: it cannot be read or used; holds every problem with its line.
    """
    document = read_document(read_text(Path(name)), name, list_key=LIST)
    lines = {(*_ABOVE, *path): line for path, line in document.lines.items()}
    known = replace(settings.source.known, folder=Path(name).parent)
    findings = list(document.findings)
    built: list[Instance] = []
    try:
        entries = list(enumerate(_InstanceFile.model_validate(document.data, context=known).instances))
    except ValidationError as error:
        findings += (
            found for found in explain(error, document.data, _InstanceFile) if found.path not in document.unread
        )
    else:
        shared = Shared(settings.cluster.engine, settings.cluster.model)
        code = [at for at, entry in entries if names_new_code(entry, settings)]
        built, refused = build_all(((at, entry) for at, entry in entries if at not in code), shared, validate)
        across = [*check_instances(entries, lines), *refused]
        across += (Finding((*_ABOVE, LIST, at, "engine"), NEW_CODE) for at in code)
        findings += (replace(found, path=found.path[len(_ABOVE) :]) for found in across)
    if findings:
        raise ConfigError(name, [finding.located(document.lines) for finding in findings])
    return tuple(built)
