"""What a folder of a model says about its tokens: files as Hugging Face's transformers writes them.

`tokenizer.json` must be there; `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json` may be.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
GENERATION: Final = "generation_config.json"
DEFAULT: Final = "default"
NEEDS: Final = "a tokenizer needs two more packages: pip install 'pd-coordinator[tokens]'"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files' content.

    Attributes:
        tokenizer: tokenizer.json.
        decoder: its decoder; None where it has none.
        templates: chat templates by name; most models have one, `default`.
        tokens: special tokens by their names (`bos_token`, `eos_token`, ...), for templates.
        eos_ids: tokens that end a generation, as generation_config.json has them.
    """

    tokenizer: bytes
    decoder: Any
    templates: Mapping[str, str]
    tokens: Mapping[str, str]
    eos_ids: frozenset[int]


def missing_extra() -> str | None:
    """What to install, where the packages that a tokenizer needs are missing; None where they are there."""
    found = all(importlib.util.find_spec(name) is not None for name in ("tokenizers", "jinja2"))
    return None if found else NEEDS


def read_folder(folder: Path) -> ModelFolder:
    """Read the files.

    Raises:
        ValueError: one is missing, or is not what it should be, in a sentence that names it.
    """
    tokenizer = _bytes(folder / TOKENIZER)
    config = _object(folder / CONFIG)
    ids = _object(folder / GENERATION).get("eos_token_id")
    return ModelFolder(
        tokenizer=tokenizer,
        decoder=_decoder(tokenizer, folder / TOKENIZER),
        templates=_templates(folder, config),
        tokens={name: text for name, value in config.items() if (text := _token(name, value)) is not None},
        eos_ids=frozenset(one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)),
    )


class _File(msgspec.Struct):
    decoder: Any = None


def _decoder(data: bytes, path: Path) -> Any:
    try:
        return msgspec.json.decode(data, type=_File).decoder
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(_bytes(path), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _templates(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """The template in a file of its own wins over the one in tokenizer_config.json."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return {DEFAULT: _bytes(path).decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text") from error
    given = config.get("chat_template")
    if isinstance(given, str):
        return {DEFAULT: given}
    named = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return {str(one.get("name")): one["template"] for one in named if isinstance(one.get("template"), str)}


def _token(name: str, value: Any) -> str | None:
    if not name.endswith("_token"):
        return None
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
