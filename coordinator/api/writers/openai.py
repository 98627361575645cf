"""What OpenAI's chat completions and completions share.

Sources: OpenAI's API reference; vLLM's `protocol.py`, whose `token_ids` in choices are used where a client wants ids.
"""

from collections.abc import Sequence
from typing import Any, Final

from coordinator.api.bodies import dump
from coordinator.api.generation import Generation

from .answer import STOP, STOP_STRING, TokenLogprob, Usage

DONE: Final = b"data: [DONE]\n\n"


class OpenAiShapes:
    """Frames and numbers.

    Args:
        head: `id`, `object`, `created` and `model`, in this order.
        generation: what the client asked for.
    """

    tail_has_token = False

    def __init__(self, head: dict[str, object], generation: Generation) -> None:
        self._head = head
        self._ids = generation.return_ids
        self._logprobs = generation.logprobs
        self._include_usage = generation.include_usage
        self._chunk = b"data: " + dump(head)[:-1] + b',"choices":['

    def tail(self, usage: Usage | None) -> bytes:
        """The usage chunk, where it is wanted, and `[DONE]`."""
        if usage is None or not self._include_usage:
            return DONE
        return self._chunk + b'],"usage":' + dump(usage_shape(usage)) + b"}\n\n" + DONE

    def body(self, choices: Sequence[object], usage: Usage) -> bytes:
        """A whole answer."""
        return dump({**self._head, "choices": choices, "usage": usage_shape(usage)})


def usage_shape(usage: Usage) -> dict[str, object]:
    """The object `usage`."""
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def finish(reason: str | None) -> str | None:
    """A finish reason in OpenAI's words."""
    return STOP if reason == STOP_STRING else reason


def known(logprobs: Sequence[TokenLogprob]) -> bool:
    """Whether an engine has told any log probability."""
    return any(one.logprob is not None for one in logprobs)


def with_ids(choice: dict[str, Any], ids: Sequence[int], *, wanted: bool) -> dict[str, Any]:
    """A choice with its token ids, where they are wanted."""
    return {**choice, "token_ids": list(ids)} if wanted else choice
