"""Files with keys, as they come out of a mounted Secret."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from .document import read_document, read_text
from .errors import ConfigError, Finding, Refusal
from .explain import explain
from .section import Section
from .security import ApiKey, ManagementKey, check_keys

AnyKey = TypeVar("AnyKey", bound=ManagementKey)


class _ManagementKeyFile(Section):
    keys: Annotated[tuple[ManagementKey, ...], Field(strict=False)]


class _KeyFile(Section):
    keys: Annotated[tuple[ApiKey, ...], Field(strict=False)]


def read_keys(name: str, kind: type[AnyKey], beside: Sequence[ManagementKey] = ()) -> tuple[AnyKey, ...]:
    """The keys of a file that holds a list below `keys:`, as `auth` does; an empty list lets nobody in.

    Args:
        name: the file.
        kind: what its items are.
        beside: keys from elsewhere, which must differ from these.

    Raises:
        ConfigError: it cannot be read or used.
    """
    document = read_document(read_text(Path(name)), name)
    keys, findings = _keys_in(document.data, kind)
    findings = [*document.findings, *findings]
    if not findings:
        try:
            check_keys((*beside, *keys), "keys")
        except Refusal as error:
            findings = [Finding(("keys",), error.reason)]
    if findings:
        raise ConfigError(name, [finding.located(document.lines) for finding in findings])
    return keys


def _keys_in(data: dict[str, Any], kind: type[AnyKey]) -> tuple[tuple[AnyKey, ...], list[Finding]]:
    holder = _KeyFile if issubclass(kind, ApiKey) else _ManagementKeyFile
    try:
        held: Any = holder.model_validate(data)
    except ValidationError as error:
        return (), list(explain(error, data, holder))
    return held.keys, []
