"""A request, whichever message it came in, and the answer that prefill and decode agree on."""

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from instances import answers, tokens
from instances.answers import Plan, Wish
from instances.openai.bodies import chat_text
from instances.openai.refusal import Refused
from instances.options import Options
from instances.xllm import vocabulary
from instances.xllm.proto.engine_pb2 import ChatRequest, CompletionRequest, DisaggRequest

CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE = 1, 2, 3, 4, 5, 6
DEFAULT_MAX_TOKENS = 5120
_MOST_STOPS, _MOST_TOP_LOGPROBS = 4, 2000
_SEED_STEP = 1_000_003


class Failed(Exception):
    """A request ends with a status, which goes to the service as `gen_status`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class ProcessDies(Exception):
    """A check of the real engine fails, which aborts its process."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked for, in the simulators' own token ids.

    Attributes:
        req_id: the engine's own id.
        service_req_id: the service's id, under which the answer goes back.
        source: `ip:port` of the service that wants it; empty: the master.
        decode: name of the decode instance.
        stop_sequences: the stop texts as tokens, as the engine looks for them.
        logprobs: whether they are wanted; top_logprobs: alternatives for each token.
    """

    req_id: str
    service_req_id: str
    source: str
    prompt: str
    tokens: tuple[int, ...]
    stream: bool
    max_tokens: int
    decode: str = ""
    n: int = 1
    best_of: int = 1
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    echo: bool = False
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def text(self) -> str:
        """What the prompt's ids say."""
        return vocabulary.decode(vocabulary.to_wire(token) for token in self.tokens)


def read(message: CompletionRequest | ChatRequest) -> Ask:
    """Check a request; raises Failed, or ProcessDies for empty token ids with a routing."""
    is_chat = isinstance(message, ChatRequest)
    _check(message)
    prompt = _prompt(message)
    if not prompt:
        raise Failed(INVALID_ARGUMENT, "Prompt is empty")
    routed = message.HasField("routing")
    ids = list(message.token_ids) if routed else vocabulary.encode(prompt)
    if not ids:
        raise ProcessDies("Check failed: !token_ids.empty()")
    best_of = message.best_of if message.HasField("best_of") else max(1, message.n)
    n = message.n if message.HasField("n") else 1
    return Ask(
        req_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        service_req_id=message.service_request_id,
        source=message.source_xservice_addr,
        prompt=prompt,
        tokens=tuple(vocabulary.from_wire(token) for token in ids),
        # results cannot be streamed while it is not known which are the best
        stream=message.stream and best_of == n,
        max_tokens=message.max_tokens or DEFAULT_MAX_TOKENS,
        decode=message.routing.decode_name,
        n=n,
        best_of=best_of,
        ignore_eos=message.ignore_eos,
        stop_tokens=tuple(vocabulary.from_wire(token) for token in message.stop_token_ids),
        stop_sequences=tuple(_inner(vocabulary.encode(stop)) for stop in message.stop if stop),
        echo=isinstance(message, CompletionRequest) and message.echo,
        logprobs=message.logprobs if isinstance(message, ChatRequest) else message.HasField("logprobs"),
        top_logprobs=message.top_logprobs if isinstance(message, ChatRequest) else message.logprobs,
    )


def same_ids(message: CompletionRequest | ChatRequest) -> bool:
    """Whether the ids that came are those that the engine's own tokenizer gives for the prompt."""
    return list(message.token_ids) == vocabulary.encode(_prompt(message))


def _prompt(message: CompletionRequest | ChatRequest) -> str:
    if isinstance(message, CompletionRequest):
        return message.prompt
    listed: list[Mapping[str, Any]] = [{"role": one.role, "content": one.content} for one in message.messages]
    try:
        return chat_text({"messages": listed})
    except Refused:
        return ""


def _inner(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(vocabulary.from_wire(token) for token in ids)


def _check(message: CompletionRequest | ChatRequest) -> None:
    """The parameter checks of the engine (xLLM protocol page §6); raises Failed."""
    n = message.n if message.HasField("n") else 1
    best_of = message.best_of if message.HasField("best_of") else n
    top = message.top_logprobs if isinstance(message, ChatRequest) else message.logprobs
    echoes = isinstance(message, CompletionRequest) and message.echo and message.HasField("logprobs")
    for wrong, text in (
        (n < 1, "n should be at least 1"),
        (n > best_of, "n should be less than or equal to best_of"),
        (len(message.stop) > _MOST_STOPS, "stop size is too large"),
        (not 0 <= message.temperature <= 2, "temperature must be between 0.0 and 2.0"),
        (not 0 <= message.top_p <= 1, "top_p must be between 0.0 and 1.0"),
        (not -2 <= message.presence_penalty <= 2, "presence_penalty must be between -2.0 and 2.0"),
        (not 0 <= message.frequency_penalty <= 2, "frequency_penalty must be between 0.0 and 2.0"),
        (echoes, "logprobs is not supported with echo"),
        (not 0 <= top <= _MOST_TOP_LOGPROBS, "logprobs must be between 0 and 2000"),
    ):
        if wrong:
            raise Failed(INVALID_ARGUMENT, text)


def for_decode(ask: Ask, max_context_len: int) -> DisaggRequest:
    """The request as prefill tells decode of it."""
    message = DisaggRequest(
        req_id=ask.req_id,
        service_req_id=ask.service_req_id,
        source_xservice_addr=ask.source,
        tokens_num=len(ask.tokens),
        prompt=ask.prompt,
        prompt_tokens=[vocabulary.to_wire(token) for token in ask.tokens],
        stream=ask.stream,
        max_tokens=ask.max_tokens,
        max_context_len=max_context_len,
        seq_capacity=len(ask.tokens) + ask.max_tokens + 1,
        ignore_eos=ask.ignore_eos,
        eos_token_id=vocabulary.EOS,
        stop_token_ids=[vocabulary.to_wire(token) for token in ask.stop_tokens],
        n=ask.n,
        best_of=ask.best_of,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        logprobs=ask.logprobs,
        top_logprobs=ask.top_logprobs,
        echo=ask.echo,
        skip_special_tokens=True,
    )
    for sequence in ask.stop_sequences:
        message.stop_sequences.add(seq_tokens=[vocabulary.to_wire(token) for token in sequence])
    return message


def from_prefill(message: DisaggRequest) -> Ask:
    """The request as decode was told of it."""
    return Ask(
        req_id=message.req_id,
        service_req_id=message.service_req_id,
        source=message.source_xservice_addr,
        prompt=message.prompt,
        tokens=_inner(message.prompt_tokens),
        stream=message.stream,
        max_tokens=message.max_tokens,
        n=max(1, message.n),
        best_of=max(1, message.best_of),
        ignore_eos=message.ignore_eos,
        stop_tokens=_inner(message.stop_token_ids),
        stop_sequences=tuple(_inner(sequence.seq_tokens) for sequence in message.stop_sequences),
        echo=message.echo,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
    )


def plans(ask: Ask, options: Options, most: int, *, partial_first: bool = False) -> list[Plan]:
    """The answer's sequences, the same on every instance.

    Args:
        ask: the request.
        options: seed and bounds of the instance.
        most: prompt and answer together, in tokens.
        partial_first: begin with a character that is split over two tokens.
    """
    limit = max(1, min(ask.max_tokens, most - len(ask.tokens)))
    wish = Wish(
        prompt=ask.tokens,
        limit=limit,
        ignore_eos=ask.ignore_eos,
        stop_tokens=ask.stop_tokens,
        natural_length=answers.marked_length(ask.text),
    )
    made = []
    for number in range(ask.n):
        own = dataclasses.replace(wish, seed=number * _SEED_STEP if number else None)
        plan = answers.plan(own, options.seed, options.answer_tokens)
        made.append(_ended(_split_first(plan, limit) if partial_first else plan, ask.stop_sequences))
    return made


def _split_first(plan: Plan, limit: int) -> Plan:
    ids = (*tokens.split_character(answers.SPLIT_CHARACTERS[0]), *plan.tokens)[:limit]
    finish = plan.finish if len(ids) == len(plan) + 2 else "length"
    return Plan(ids, tokens.pieces(ids), finish)


def _ended(plan: Plan, sequences: Sequence[tuple[int, ...]]) -> Plan:
    """The plan, cut after the first stop sequence: the engine looks for tokens, and takes nothing back."""
    for end in range(1, len(plan) + 1):
        if any(sequence and plan.tokens[:end][-len(sequence) :] == sequence for sequence in sequences):
            return Plan(plan.tokens[:end], plan.texts[:end], "stop")
    return plan


def lost(plan: Plan, known: int) -> Plan:
    """The answer without the right KV: what prefill gave, then unmistakable rubbish, in text and ids."""
    wrong = answers.wrong_plan(plan, known)
    return dataclasses.replace(wrong, tokens=wrong.tokens[:known] + (vocabulary.LOST,) * (len(wrong) - known))
