"""What an answer is made of, in no API's words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

STOP: Final = "stop"  # the model, or a stop token, has ended the answer
STOP_STRING: Final = "stop_string"  # a text that the client named has; in OpenAI's words this is `stop` too
LENGTH: Final = "length"


class TokenLogprob(NamedTuple):
    """A token with its log probability.

    Attributes:
        token_id: its id; None: unknown.
        text: as it looks inside of a text.
        logprob: None: unknown, as that of a prompt's first token.
        data: its bytes, where they are known and not those of `text`; half a character has no text of its own.
        top: the most likely tokens in its place.
    """

    token_id: int | None
    text: str
    logprob: float | None
    data: bytes | None = None
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What comes next in one answer, or all of it.

    Attributes:
        text: may be empty while a character or a stop string is not complete.
        token_ids: where they are known.
        logprobs: of these tokens, where they are wanted.
        finish_reason: STOP, STOP_STRING, LENGTH or an engine's word; None: the answer goes on.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens; `completion_tokens` of all answers together; `cached_tokens` None: unknown."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Writer(Protocol):
    """Writes the answer to one request, as a stream or as a whole.

    Attributes:
        tail_has_token: whether the last bytes of a stream tell a token.
    """

    tail_has_token: bool

    def prompt(self, index: int, prompt: Delta) -> bytes:
        """The prompt that answer number `index` begins with; called first, for a stream and for a whole answer."""
        ...

    def piece(self, index: int, delta: Delta) -> bytes:
        """Stream bytes for what comes next in answer number `index`; none where there is nothing to show."""
        ...

    def tail(self, usage: Usage | None) -> bytes:
        """The last bytes of the stream, after every answer has had its finish reason."""
        ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """A complete answer that is no stream."""
        ...
