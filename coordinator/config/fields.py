"""Types of single values: ranges, choices, names."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema

from .address import host_of, parse_url
from .errors import Refusal, did_you_mean, shown
from .source import ENGINES, Known

_YEAR_S = 31_536_000
_GROUP_BITS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PLUGIN = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:\0]+\.py):[A-Za-z_]\w*")
_LOGGER = re.compile(r"pd_coordinator(\.[a-z_]+){0,5}|asyncio|aiohttp")
_IDENTIFIER = re.compile(r"[A-Za-z0-9._:@+=~,\[\]-]{1,128}")


def _engine(name: str, info: ValidationInfo) -> str:
    known = info.context or Known()
    return located_engine(_one_of(name, "engine", known.engines), known)


def located_engine(name: str, known: Known) -> str:
    """The same name; that of a class in a file with the file's absolute path: relative ones begin at `known.folder`."""
    file, _, attribute = name.rpartition(":")
    if known.folder is None or not file.endswith(".py"):
        return name
    return f"{(known.folder / file).absolute()}:{attribute}"


def _policy(name: str, info: ValidationInfo) -> str:
    return _one_of(name, "policy", (info.context or Known()).policies)


def _one_of(name: str, what: str, known: tuple[str, ...] | None) -> str:
    if _PLUGIN.fullmatch(name):
        return name
    if known is None:
        if _NAME.fullmatch(name):
            return name
        raise Refusal(f"must be the name of a {what} or module:Class, not {shown(name)}")
    if name in known:
        return name
    raise Refusal(f"must be one of: {', '.join(known)}; or module:Class, not {shown(name)}", did_you_mean(name, known))


def _url(text: str) -> str:
    parse_url(text)
    return text


def _path(text: str) -> str:
    if re.fullmatch(r"/[!-~]*", text):
        return text
    raise Refusal(f"must be a path that begins with / and has no spaces, not {shown(text)}")


def _tokenizer(text: str, info: ValidationInfo) -> str:
    """The folder's absolute path."""
    start: Path | None = (info.context or Known()).folder
    if start is None:
        return text
    if "\0" in text:
        raise Refusal(f"must be the path of a folder, not {shown(text)}")
    folder = (start / text).absolute()
    if not folder.is_dir():
        raise Refusal(f"no such folder: {str(folder)!r}")
    if not (folder / "tokenizer.json").is_file():
        raise Refusal(f"the folder {str(folder)!r} has no tokenizer.json")
    return str(folder)


def _identifier(text: str) -> str:
    if _IDENTIFIER.fullmatch(text):
        return text
    raise Refusal(f"must be 1 to 128 characters out of a-z A-Z 0-9 . _ : @ + = ~ , [ ] -; not {shown(text)}")


def _network(text: str) -> str:
    """An address or a network, in its usual form."""
    try:
        return str(ipaddress.ip_network(text))
    except ValueError:
        raise Refusal(f"must be a network like 10.0.0.0/8 or fd00::/8, or an address; not {shown(text)}") from None


def _logger(name: str) -> str:
    if _LOGGER.fullmatch(name):
        return name
    hint = did_you_mean(name, (f"pd_coordinator.{name}",)) if _NAME.fullmatch(name) else None
    raise Refusal(f"must be a logger of ours like pd_coordinator.engines, asyncio or aiohttp; not {shown(name)}", hint)


def _group(value: object) -> object:
    """Groups are text inside; MindIE's are numbers."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _GROUP_BITS
    return str(value) if is_number else value


Text = Annotated[str, Field(min_length=1, max_length=1024)]
Host = Annotated[str, AfterValidator(host_of)]
Url = Annotated[str, AfterValidator(_url)]
TokenizerFolder = Annotated[Text, AfterValidator(_tokenizer)]
UrlPath = Annotated[str, AfterValidator(_path)]
Network = Annotated[str, AfterValidator(_network)]
Identifier = Annotated[str, AfterValidator(_identifier)]
LoggerName = Annotated[str, AfterValidator(_logger)]
Group = Annotated[Text, BeforeValidator(_group), WithJsonSchema({"type": ["string", "integer"]})]

EngineName = Annotated[
    str,
    AfterValidator(_engine),
    WithJsonSchema({"anyOf": [{"enum": list(ENGINES)}, {"type": "string", "pattern": ".:."}]}),
]
PolicyName = Annotated[str, AfterValidator(_policy)]

ListenPort = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Size = Annotated[int, Field(ge=1, le=2**40)]
Factor = Annotated[float, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(ge=0, le=_YEAR_S)]
Period = Annotated[float, Field(ge=0.01, le=_YEAR_S)]
