"""Token ids on the wire, and a tokenizer folder that gives them.

The simulators think in the ids of `instances.tokens`, which leave large gaps. On xLLM's wire ids are dense: 0 ends a
text, then come the known word forms, the 256 single bytes, the halves of the characters that answers split over two
tokens, and the word that decode writes without the KV. Everything that is no known form is spelt in bytes.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType

from instances import answers, tokens

EOS = tokens.EOS
LOST = 1 << 27
_STRANGE = 1 << 28  # ids of the wire that are in no vocabulary
_FORMS = MappingProxyType({tokens.token_bytes(form): form for form in range(1, tokens.FORM_COUNT)})
_HALVES = [half for character in answers.SPLIT_CHARACTERS for half in tokens.split_character(character)]
_INNER = [
    *range(tokens.FORM_COUNT),
    # a form of one byte stands for that byte too: a tokenizer has one id for one text
    *(tokens.single_byte(byte) for byte in range(256) if bytes((byte,)) not in _FORMS),
    *dict.fromkeys(_HALVES),
    LOST,
]
_WIRE = MappingProxyType({inner: wire for wire, inner in enumerate(_INNER)})
_BYTES = [_FORMS.get(bytes((byte,))) or _WIRE[tokens.single_byte(byte)] for byte in range(256)]
SIZE = len(_INNER)
# a word with the blank before it, or one other ASCII character; nothing in it depends on a version of Unicode
_PIECES = r" ?[^\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]+|[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]"
_PIECE = re.compile(_PIECES)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
END_OF_TEXT = "<|end|>"


def to_wire(inner: int) -> int:
    """The id on the wire; raises KeyError for a token that is in no answer."""
    return inner - _STRANGE if inner >= _STRANGE else _WIRE[inner]


def from_wire(wire: int) -> int:
    """The simulators' own id; one of its own for an id that is not in the vocabulary."""
    return _INNER[wire] if 0 <= wire < SIZE else _STRANGE + max(0, wire)


def token_bytes(inner: int) -> bytes:
    """Bytes that stand for a token."""
    return answers.WRONG_TEXT.encode() if inner == LOST else tokens.token_bytes(inner)


def encode(text: str) -> list[int]:
    """Ids of a text on the wire, the same as from the folder's tokenizer."""
    ids: list[int] = []
    for match in _PIECE.finditer(text):
        piece = match.group().encode("utf-8", "surrogatepass")
        form = _FORMS.get(piece)
        ids.extend([form] if form is not None else (_BYTES[byte] for byte in piece))
    return ids


def decode(wire: Iterable[int]) -> str:
    """Text of ids on the wire; what is not UTF-8 shows as the replacement character."""
    return b"".join(token_bytes(from_wire(token)) for token in wire).decode("utf-8", "replace")


def _alphabet() -> Sequence[str]:
    """The printable character that stands for each byte in a byte-level tokenizer."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, object]:
    """`tokenizer.json`: byte-level, without merges; a piece is one token if it is a known form."""
    alphabet = _alphabet()
    entries = {"".join(alphabet[byte] for byte in token_bytes(inner)): wire for inner, wire in _WIRE.items() if inner}
    isolate = {"type": "Split", "pattern": {"Regex": _PIECES}, "behavior": "Isolated", "invert": False}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": EOS, "content": END_OF_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [isolate, bytewise]},
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {END_OF_TEXT: EOS, **entries},
            "merges": [],
        },
    }


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer folder (tokenizer.json, tokenizer_config.json, config.json); it is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 131_072,
        "clean_up_tokenization_spaces": False,
    }
    model = {"model_type": "simulated", "eos_token_id": EOS, "vocab_size": SIZE, "max_position_embeddings": 131_072}
    for name, value in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", config),
        ("config.json", model),
        ("generation_config.json", {"eos_token_id": EOS}),
    ):
        text = json.dumps(value, ensure_ascii=False, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
