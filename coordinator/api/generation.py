"""What a client wants generated, in no API's words: for engines that are not asked in the client's own words.

Ranges and defaults are those of the APIs' own servers (OpenAI's reference, TGI's router, vLLM's `SamplingParams`); a
field that is not read here has no effect, unless the answer would not be what the client asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.wire.json_edit import request_fields

from .asked import MOST_SEED, MOST_TOKENS, Asked

CHAT: Final = "/v1/chat/completions"
OPENAI: Final = "openai"
TGI: Final = "tgi"
VLLM: Final = "vllm"
DISAGGPB: Final = "disaggpb"
MOST_CHOICES: Final = 128
MOST_LOGPROBS: Final = 20
MOST_TEMPERATURE: Final = 1e6
COMPLETION_TOKENS: Final = 16  # OpenAI's and vLLM's default for completions
TGI_TOKENS: Final = 100
_NONE: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Generation:
    """A request, read to the end. Exactly one of `prompt` and `messages` is there.

    Attributes:
        prompt: text or token ids.
        messages: of a chat, as the client sent them.
        tools: what the chat template is told of, as the client sent it.
        chat_template_kwargs: further variables of the chat template.
        add_generation_prompt: whether the chat template begins the assistant's answer.
        max_tokens: most tokens of each answer; None: as many as the engine makes.
        temperature: 0 is greedy; None, here and below: the engine's own default.
        n: answers that are wanted.
        best_of: answers that are made, of which the `n` best are wanted.
        stop: texts that end an answer.
        include_stop: whether such a text is shown.
        stop_token_ids: tokens that end an answer, besides the model's own.
        logprobs: None: off; else how many alternatives to each token are wanted.
        echo: whether the answer begins with the prompt.
        add_special_tokens: whether the tokenizer puts its marks around the prompt.
        include_usage: whether a stream tells the numbers of tokens at its end.
        return_ids: whether answers hold token ids, as they must where there is no tokenizer.
    """

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    tools: tuple[object, ...] | None = None
    chat_template_kwargs: Mapping[str, object] = field(default_factory=lambda: _NONE, hash=False)
    add_generation_prompt: bool = True
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int = 1
    best_of: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    include_usage: bool = False
    return_ids: bool = False


def generation_of(request: Request) -> Generation:
    """Read a request for one prompt.

    Raises:
        BadRequest: its API is not one of OpenAI, TGI, vLLM and disaggpb, or a field is missing, mistyped or out of
            range, or it holds several prompts.
    """
    found = generations_of(request)
    if len(found) > 1:
        raise BadRequest("one prompt for each request is taken here, and `prompt` is a list of several")
    return found[0]


def generations_of(request: Request) -> tuple[Generation, ...]:
    """Read a request, which may hold several prompts (OpenAI's completions); raises BadRequest as `generation_of`."""
    try:
        asked = Asked(request_fields(request))
    except ValueError as error:
        raise BadRequest("the body must be a JSON object", detail=str(error)) from None
    if request.api == OPENAI:
        return _openai(asked, request)
    if request.api == TGI:
        return (_tgi(asked, request),)
    if request.api == VLLM:
        return _several(asked, _vllm(asked), "prompt")
    if request.api == DISAGGPB:
        return (_disaggpb(asked, request),)
    raise BadRequest("this API is not served by the engines of this model: use OpenAI's, TGI's or vLLM's")


def _several(asked: Asked, rest: dict[str, Any], name: str) -> tuple[Generation, ...]:
    return tuple(Generation(prompt=prompt, **rest) for prompt in asked.prompts(name))


def _sampling(asked: Asked) -> dict[str, Any]:
    """What OpenAI's and vLLM's APIs have in common."""
    found: dict[str, Any] = {
        "stream": asked.flag("stream"),
        "temperature": asked.number("temperature", 0, 100),
        "top_p": asked.number("top_p", 0, 1, above=True),
        "top_k": _top_k(asked),
        "seed": asked.whole("seed", -(2**63), MOST_SEED),
        "presence_penalty": asked.number("presence_penalty", -2, 2),
        "frequency_penalty": asked.number("frequency_penalty", -2, 2),
        "repetition_penalty": asked.number("repetition_penalty", 0, 100, above=True),
        "n": asked.whole("n", 1, MOST_CHOICES) or 1,
        "best_of": asked.whole("best_of", 1, MOST_CHOICES),
        "stop": asked.texts("stop"),
        "include_stop": asked.flag("include_stop_str_in_output"),
        "stop_token_ids": asked.ids("stop_token_ids"),
        "ignore_eos": asked.flag("ignore_eos"),
        "skip_special_tokens": asked.flag("skip_special_tokens", default=True),
        "return_ids": asked.flag("return_token_ids"),
    }
    if found["best_of"] is not None and found["best_of"] < found["n"]:
        raise BadRequest("`best_of` must be at least `n`")
    if (found["best_of"] or 1) > found["n"] and found["stream"]:
        raise BadRequest("`best_of` above `n` and `stream` exclude each other")
    return found


def _top_k(asked: Asked) -> int | None:
    """-1 and 0 mean all tokens, which is as good as nothing."""
    value = asked.whole("top_k", -1, MOST_TOKENS)
    return value if value and value > 0 else None


def _openai(asked: Asked, request: Request) -> tuple[Generation, ...]:
    rest = _sampling(asked)
    chat = request.path.startswith(CHAT)
    if asked.raw("stream_options") is not None and not rest["stream"]:
        raise BadRequest("`stream_options` goes with `stream` only")
    rest["include_usage"] = asked.inner("stream_options").flag("include_usage")
    form = asked.plain("response_format").get("type", "text")
    if form != "text":
        raise BadRequest("`response_format` can only be text here")
    limits = asked.whole("max_completion_tokens", 1, MOST_TOKENS), asked.whole("max_tokens", 1, MOST_TOKENS)
    rest["max_tokens"] = limits[1] if limits[0] is None else limits[0]
    rest["logprobs"] = _chat_logprobs(asked) if chat else asked.whole("logprobs", 0, MOST_LOGPROBS)
    first, second = ("messages", "prompt") if chat else ("prompt", "messages")
    if asked.raw(first) is None and asked.raw(second) is None:
        raise BadRequest(f"`{first}` is missing")
    if (asked.raw(first) is None) == chat:
        rest["add_special_tokens"] = asked.flag("add_special_tokens", default=True)
        return _completion(asked, rest, chat=chat)
    rest["add_special_tokens"] = asked.flag("add_special_tokens")
    return (Generation(messages=_messages(asked), **rest, **_templated(asked)),)


def _completion(asked: Asked, rest: dict[str, Any], *, chat: bool) -> tuple[Generation, ...]:
    if asked.typed("suffix", str, "a string"):
        raise BadRequest("`suffix` is not served by the engines of this model")
    if rest["max_tokens"] is None and not chat:
        rest["max_tokens"] = COMPLETION_TOKENS
    return _several(asked, rest | {"echo": asked.flag("echo")}, "prompt")


def _chat_logprobs(asked: Asked) -> int | None:
    top = asked.whole("top_logprobs", 0, MOST_LOGPROBS)
    if asked.flag("logprobs"):
        return top or 0
    if top:
        raise BadRequest("`top_logprobs` needs `logprobs` to be true")
    return None


def _messages(asked: Asked) -> tuple[Mapping[str, object], ...]:
    wanted = "a list of objects with a role"
    found = asked.typed("messages", list[dict[str, Any]], wanted) or []
    if not found or not all(isinstance(message.get("role"), str) for message in found):
        raise asked.wrong("messages", wanted)
    return tuple(found)


def _templated(asked: Asked) -> dict[str, Any]:
    """What the chat template is given besides messages."""
    if asked.raw("chat_template") is not None:
        raise BadRequest("`chat_template` is the model's own here, and not taken from requests")
    if asked.flag("continue_final_message"):
        raise BadRequest("`continue_final_message` is not served by the engines of this model")
    tools: Sequence[object] | None = asked.typed("tools", list[Any], "a list")
    choice = bytes(asked.raw("tool_choice") or b"").strip(b'"')
    if choice not in (b"", b"auto", b"none"):
        raise BadRequest("`tool_choice` can only be auto or none here")
    return {
        "tools": tuple(tools) if tools and choice != b"none" else None,
        "chat_template_kwargs": asked.plain("chat_template_kwargs"),
        "add_generation_prompt": asked.flag("add_generation_prompt", default=True),
    }


def _vllm(asked: Asked) -> dict[str, Any]:
    """vLLM's demo server: the prompt is part of every text that it sends."""
    if asked.flag("use_beam_search"):
        raise BadRequest("`use_beam_search` is not served by the engines of this model")
    return {
        **_sampling(asked),
        "max_tokens": asked.whole("max_tokens", 1, MOST_TOKENS) or COMPLETION_TOKENS,
        "add_special_tokens": asked.flag("add_special_tokens", default=True),
        "echo": True,
    }


def _tgi(asked: Asked, request: Request) -> Generation:
    """TGI samples only where it is told to, and shows stop sequences; streams and details tell log probabilities."""
    parameters = asked.inner("parameters")
    prompts = asked.prompts("inputs")
    if len(prompts) > 1:
        raise BadRequest("`inputs` must be one prompt")
    stream = request.ask.stream
    best_of = parameters.whole("best_of", 1, MOST_CHOICES)
    if stream and (best_of or 1) > 1:
        raise BadRequest("`parameters.best_of` above 1 and streams exclude each other")
    if parameters.raw("grammar") is not None:
        raise BadRequest("`parameters.grammar` is not served by the engines of this model")
    found: dict[str, Any] = {
        "temperature": parameters.number("temperature", 0, 100, above=True),
        "top_p": parameters.number("top_p", 0, 1, above=True),
        "top_k": parameters.whole("top_k", 1, MOST_TOKENS),
    }
    if not parameters.flag("do_sample") and all(value is None for value in found.values()):
        found["temperature"] = 0.0
    tokens = parameters.whole("max_new_tokens", 1, MOST_TOKENS)
    top = parameters.whole("top_n_tokens", 0, MOST_LOGPROBS)
    return Generation(
        prompt=prompts[0],
        stream=stream,
        max_tokens=tokens or parameters.whole("max_tokens", 1, MOST_TOKENS) or TGI_TOKENS,
        seed=parameters.whole("seed", 0, MOST_SEED),
        frequency_penalty=parameters.number("frequency_penalty", -2, 2),
        repetition_penalty=parameters.number("repetition_penalty", 0, 100, above=True),
        best_of=best_of,
        stop=parameters.texts("stop") or parameters.texts("stop_sequences"),
        include_stop=True,
        logprobs=top or 0 if stream or parameters.flag("details") or top else None,
        echo=parameters.flag("return_full_text"),
        ignore_eos=parameters.flag("ignore_eos"),
        **found,
    )


def _disaggpb(asked: Asked, request: Request) -> Generation:
    """Token ids in, token ids out (disaggpb protocol page §3); streams unless told otherwise."""
    ids = asked.ids("token_ids")
    if not ids:
        raise asked.wrong("token_ids", "a list of token ids, at least one")
    return Generation(
        prompt=ids,
        stream=request.ask.stream,
        max_tokens=asked.whole("max_new_tokens", 1, MOST_TOKENS),
        temperature=asked.number("temperature", 0, MOST_TEMPERATURE),
        return_ids=True,
    )
