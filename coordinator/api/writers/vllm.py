"""vLLM's demo server: every document has the prompts and all of the texts so far.

Source: vLLM, `entrypoints/api_server.py`. Its documents grow with the answer, so a long stream is much longer than the
answer; OpenAI's API has no such trait.
"""

from collections.abc import Sequence
from typing import Any

from coordinator.api.bodies import dump
from coordinator.api.generation import Generation

from .answer import Delta, Usage


class VllmWriter:
    """Writes vLLM's `/generate`; documents of a stream end with a NUL."""

    tail_has_token = False

    def __init__(self, generation: Generation) -> None:
        self._texts = [""] * generation.n
        self._token_ids: list[list[int]] = [[] for _ in range(generation.n)]
        self._ids = generation.return_ids

    def prompt(self, index: int, prompt: Delta) -> bytes:
        """Nothing by itself: the prompt is the beginning of each text."""
        self._texts[index] = prompt.text
        return b""

    def piece(self, index: int, delta: Delta) -> bytes:
        """All texts so far."""
        if not delta.text and not (self._ids and delta.token_ids):
            return b""
        self._texts[index] += delta.text
        self._token_ids[index] += delta.token_ids
        return self._document() + b"\x00"

    def tail(self, usage: Usage | None) -> bytes:  # noqa: ARG002 - these streams tell no numbers
        """Nothing."""
        return b""

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:  # noqa: ARG002 - the same
        """All texts."""
        for index, choice in enumerate(choices):
            self._texts[index] += choice.text
            self._token_ids[index] += choice.token_ids
        return self._document()

    def _document(self) -> bytes:
        document: dict[str, Any] = {"text": self._texts}
        if self._ids:
            document["token_ids"] = self._token_ids
        return dump(document)
