"""From a client's request to what an xLLM instance is asked (xLLM protocol page §4.4, §5.4)."""

from dataclasses import dataclass

import msgspec

from coordinator.api.generation import OPENAI, Generation
from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.engines.token_prompts import TokenRequest, read_token_request
from coordinator.tokens import Tokenizer

MOST_STOPS = 4
MOST_TOP_LOGPROBS = 2000
NO_TEXT = "."  # stands for a prompt of token ids: engines refuse an empty text, and go by the ids


async def read_request(request: Request, tokenizer: Tokenizer | None) -> TokenRequest:
    """Read and tokenise a request; long prompts are worked on in a thread. There is at least one token (§5.4).

    Raises:
        RequestError: it cannot be served; mostly BadRequest, in the client's words.
    """
    asked = await read_token_request(request, tokenizer)
    _check(asked.generation, request)
    return asked


def _check(generation: Generation, request: Request) -> None:
    """Refuse what every instance would refuse, in better words and without asking one (protocol page §6)."""
    made = generation.best_of or generation.n
    if generation.stream and made != generation.n:
        raise BadRequest("`best_of` other than `n` and streams exclude each other")
    if len(generation.stop) > MOST_STOPS:
        raise BadRequest(f"at most {MOST_STOPS} stop texts are taken")
    _range("temperature", generation.temperature, 0, 2)
    _range("top_p", generation.top_p, 0, 1)
    _range("presence_penalty", generation.presence_penalty, -2, 2)
    _range("frequency_penalty", generation.frequency_penalty, 0, 2)
    _range("logprobs", generation.logprobs, 0, MOST_TOP_LOGPROBS)
    if request.api == OPENAI and generation.echo and generation.logprobs is not None:
        raise BadRequest("`echo` and `logprobs` exclude each other")


def _range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise BadRequest(f"`{name}` must be from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Way:
    """Where a request goes and its results come back to.

    Attributes:
        service: `ip:port` of our own server, which the instances push results to.
        model: exactly as prefill calls it.
    """

    wire_id: str
    prefill_name: str
    decode_name: str
    service: str
    model: str


def completion_body(asked: TokenRequest, way: Way) -> bytes:
    """CompletionRequest as JSON, its names those of the protobuf fields.

    Chats go the same way: their prompt is rendered here, and the ids are what counts.
    """
    wanted = asked.generation
    given: dict[str, object] = {
        "model": way.model,
        "prompt": asked.prompt.text or NO_TEXT,
        "stream": wanted.stream,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "top_k": wanted.top_k,
        "n": wanted.n,
        "best_of": wanted.best_of,
        "logprobs": wanted.logprobs,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
        "repetition_penalty": wanted.repetition_penalty,
        "skip_special_tokens": wanted.skip_special_tokens,
        "ignore_eos": wanted.ignore_eos,
        "stop": wanted.stop or None,
        "stop_token_ids": wanted.stop_token_ids or None,
        "service_request_id": way.wire_id,
        "source_xservice_addr": way.service,
        "token_ids": asked.prompt.ids,
        "routing": {"prefill_name": way.prefill_name, "decode_name": way.decode_name},
    }
    return msgspec.json.encode({name: value for name, value in given.items() if value is not None})
