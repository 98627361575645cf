"""Token ids on the wire, and a tokenizer folder that gives them.

They are xLLM's (`instances.xllm.vocabulary`), with two ids exchanged: here 2 ends a text, the only id for that which
these workers know (disaggpb protocol page §2), and 0 is a word like any other.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instances.xllm import vocabulary

EOS = 2
_EXCHANGED = {vocabulary.EOS: EOS, EOS: vocabulary.EOS}
LOST = vocabulary.to_wire(vocabulary.LOST)


def to_wire(inner: int) -> int:
    """The id on the wire; raises KeyError for a token that is in no answer."""
    wire = vocabulary.to_wire(inner)
    return _EXCHANGED.get(wire, wire)


def from_wire(wire: int) -> int:
    """The simulators' own id; one of its own for an id that is not in the vocabulary."""
    return vocabulary.from_wire(_EXCHANGED.get(wire, wire))


def encode(text: str) -> list[int]:
    """Ids of a text on the wire, the same as from the folder's tokenizer."""
    return [_EXCHANGED.get(wire, wire) for wire in vocabulary.encode(text)]


def decode(wire: Iterable[int]) -> str:
    """Text of ids on the wire; what is not UTF-8 shows as the replacement character."""
    return vocabulary.decode(_EXCHANGED.get(token, token) for token in wire)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer folder; it is made if it is not there."""
    vocabulary.write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    exchanged = {text: _EXCHANGED.get(wire, wire) for text, wire in known.items()}
    tokenizer["model"]["vocab"] = dict(sorted(exchanged.items(), key=lambda entry: entry[1]))
    tokenizer["added_tokens"][0]["id"] = EOS
    path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    for name in ("config.json", "generation_config.json"):
        described = json.loads((folder / name).read_text(encoding="utf-8"))
        text = json.dumps({**described, "eos_token_id": EOS}, indent=1)
        (folder / name).write_text(text + "\n", encoding="utf-8")
