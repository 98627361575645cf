"""The sections `auth` and `tls`: who may call, and what is encrypted."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from .errors import Refusal, shown
from .fields import Count, Host, Period
from .section import Section
from .source import Known

MAX_KEYS = 1000
MAX_SALTED = 64  # each of them is tried for a key that nobody knows
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"sha256:([0-9A-Za-z]{8,64}:)?[0-9a-f]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _key_name(text: str) -> str:
    if _NAME.fullmatch(text):
        return text
    raise Refusal(f"must be 1 to 64 characters out of a-z A-Z 0-9 . _ @ -, a letter or digit first; not {shown(text)}")


def _key_hash(text: str) -> str:
    if _HASH.fullmatch(text):
        return text
    # what stands there may be a key, so it is not shown
    raise Refusal("must be sha256:HEX or sha256:SALT:HEX", "`pd-coordinator key new` makes a key and this line")


def _file(text: str, info: ValidationInfo) -> str:
    """The absolute path of a file that can be read."""
    start: Path | None = (info.context or Known()).folder
    if start is None:
        return text
    if "\0" in text:
        raise Refusal(f"must be the path of a file, not {shown(text)}")
    path = (start / text).absolute()
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise Refusal(f"{str(path)!r} cannot be read: {reason}") from None
    return str(path)


def _variable(text: str) -> str:
    if _VARIABLE.fullmatch(text):
        return text
    raise Refusal(f"must be the name of a variable of the environment, not {shown(text)}")


KeyName = Annotated[str, AfterValidator(_key_name)]
KeyHash = Annotated[str, AfterValidator(_key_hash)]
File = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_file)]
Variable = Annotated[str, AfterValidator(_variable)]


def _pair(cert: str | None, key: str | None) -> None:
    if (cert is None) is not (key is None):
        raise Refusal(f"{'cert_file' if key is None else 'key_file'} needs {'key' if key is None else 'cert'}_file")


class ManagementKey(Section):
    """One key of the management plane."""

    name: KeyName = Field(description="what logs and metrics call the key")
    hash: KeyHash = Field(description="what is kept of the key, from `pd-coordinator key new`")


class ApiKey(ManagementKey):
    """One key of the data plane."""

    requests_per_minute: Count | None = Field(None, description="requests of this key within a minute; above: 429")
    max_in_flight: Count | None = Field(None, description="requests of this key at once; above: 429")


class Auth(Section):
    """Who may call."""

    keys: Annotated[tuple[ApiKey, ...], Field(strict=False)] = Field(
        (), description="keys of the data plane; none: everybody may call"
    )
    keys_file: File | None = Field(None, description="file with further ones below `keys:`; set: a key is needed")
    management_keys: Annotated[tuple[ManagementKey, ...], Field(strict=False)] = Field(
        (), description="keys of the management plane; none: whoever reaches it may call"
    )
    management_keys_file: File | None = Field(None, description="the same for the management plane")
    open_metrics: bool = Field(default=True, description="false: /metrics needs a management key too")
    engine_key_env: Variable | None = Field(None, description="variable with the key that engines want of us")
    engine_key_file: File | None = Field(None, description="file with the key that engines want of us")
    reread_s: Period = Field(10, description="seconds between two looks at the files, which are read when they change")

    @model_validator(mode="before")
    @classmethod
    def _empty_lists_are_defaults(cls, value: Any) -> Any:
        """A list whose items are all commented out is null in YAML."""
        if not isinstance(value, dict):
            return value
        lists = ("keys", "management_keys")
        return {key: item for key, item in value.items() if item is not None or key not in lists}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_keys(self.keys, "keys")
        check_keys(self.management_keys, "management_keys")
        if self.engine_key_env is not None and self.engine_key_file is not None:
            raise Refusal("engine_key_env and engine_key_file exclude each other")
        return self


class ServerTls(Section):
    """TLS of one of our ports."""

    cert_file: File | None = Field(None, description="PEM file with the certificate and its chain; set: TLS alone")
    key_file: File | None = Field(None, description="PEM file with the private key, not encrypted")
    client_ca_file: File | None = Field(
        None, description="PEM file with authorities; set: clients need a certificate of theirs"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _pair(self.cert_file, self.key_file)
        if self.client_ca_file is not None and self.cert_file is None:
            raise Refusal("client_ca_file needs cert_file and key_file beside it")
        return self


class EngineTls(Section):
    """TLS towards engines whose URL begins with https."""

    ca_file: File | None = Field(None, description="PEM file with the authorities to trust; null: the system's")
    cert_file: File | None = Field(None, description="PEM file with our certificate, for engines that want one")
    key_file: File | None = Field(None, description="PEM file with its private key, not encrypted")
    server_name: Host | None = Field(None, description="name in the engines' certificates; null: the URL's host")
    verify: bool = Field(default=True, description="false: any certificate is taken, so anybody can listen in between")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _pair(self.cert_file, self.key_file)
        return self


class Tls(Section):
    """What is encrypted."""

    data: ServerTls = Field(ServerTls(), description="TLS of the data port")
    management: ServerTls = Field(ServerTls(), description="TLS of the management, metrics and status ports")
    engines: EngineTls = Field(EngineTls(), description="TLS towards engines with https URLs")
    reread_s: Period = Field(10, description="seconds between two looks at the files, which are read when they change")


def check_keys(keys: Sequence[ManagementKey], where: str) -> None:
    """Names and hashes stand once, and there are not too many; raises Refusal."""
    names: set[str] = set()
    hashes: dict[str, str] = {}
    for key in keys:
        if key.name in names:
            raise Refusal(f"{where}: the name {key.name!r} stands twice")
        if key.hash in hashes:
            raise Refusal(f"{where}: {hashes[key.hash]!r} and {key.name!r} are the same key")
        names.add(key.name)
        hashes[key.hash] = key.name
    if len(keys) > MAX_KEYS:
        raise Refusal(f"{where}: there are {len(keys)} keys, at most {MAX_KEYS} are allowed")
    salted = sum(key.hash.count(":") > 1 for key in keys)
    if salted > MAX_SALTED:
        raise Refusal(f"{where}: there are {salted} keys with a salt, at most {MAX_SALTED} are allowed")
