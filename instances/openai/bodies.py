"""Reading the bodies of `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from instances import tokens
from instances.answers import Wish
from instances.openai.ask import Ask, Logprobs, Prompt
from instances.openai.fields import Fields, is_token_ids
from instances.openai.refusal import invalid

_MOST_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # the default of /v1/completions, in both engines
_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Rules:
    """Where the engines differ.

    Attributes:
        chat_tokens: answer length where a chat request sets none.
        most_tokens: context length; prompt and answer must fit.
        strict: refuse `stream_options` without `stream`; know `prompt_logprobs`, which cannot be streamed (vLLM).
    """

    chat_tokens: int
    most_tokens: int
    strict: bool


def chat(body: Mapping[str, Any], rules: Rules) -> Ask:
    """Read a chat body; raises Refused."""
    fields = Fields(body)
    prompt = tokens.encode(chat_text(body))
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, _MOST_LOGPROBS)
    if top and not wanted:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    _check_tools(body)
    given = fields.integer("max_completion_tokens", 1)
    older = fields.integer("max_tokens", 1)
    limit = next((value for value in (given, older) if value is not None), None)
    logprobs = Logprobs((top or 0) if wanted else None, _prompt_logprobs(fields, rules))
    return _ask(fields, body, rules, ((Prompt(prompt, tokens.decode(prompt)),), limit, rules.chat_tokens, logprobs))


def completions(body: Mapping[str, Any], rules: Rules) -> Ask:
    """Read a completions body; raises Refused."""
    fields = Fields(body)
    prompts = _prompts(body.get("prompt"))
    logprobs = Logprobs(fields.integer("logprobs", 0, _MOST_LOGPROBS), _prompt_logprobs(fields, rules))
    return _ask(fields, body, rules, (prompts, fields.integer("max_tokens", 1), _COMPLETION_TOKENS, logprobs))


def _ask(
    fields: Fields,
    body: Mapping[str, Any],
    rules: Rules,
    own: tuple[tuple[Prompt, ...], int | None, int, Logprobs],
) -> Ask:
    """What chat and completions share; `own`: prompts, limit given, limit by default, log probabilities."""
    prompts, given, default, logprobs = own
    fields.check_sampling()
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if rules.strict and options is not None and not stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    if rules.strict and stream and logprobs.prompt is not None:
        raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    limit = default if given is None else given
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest + (given or 1) > rules.most_tokens:
        raise invalid(
            f"This model's maximum context length is {rules.most_tokens} tokens. However, you requested {given or 1} "
            f"output tokens and your prompt contains {longest} input tokens. Please reduce the length.",
            "max_tokens",
        )
    return Ask(
        body=body,
        prompts=prompts,
        wish=_wish(fields, min(limit, rules.most_tokens - longest)),
        batched=isinstance(body.get("prompt"), list) and not is_token_ids(body["prompt"]),
        stream=stream,
        n=fields.integer("n", 1, 128) or 1,
        min_tokens=_min_tokens(fields, limit),
        usage=options is not None and options.boolean("include_usage"),
        usage_always=options is not None and options.boolean("continuous_usage_stats"),
        echo=fields.boolean("echo"),
        logprobs=logprobs,
    )


def _prompt_logprobs(fields: Fields, rules: Rules) -> int | None:
    return fields.integer("prompt_logprobs", -1, _MOST_LOGPROBS) if rules.strict else None


def _wish(fields: Fields, limit: int) -> Wish:
    return Wish(
        prompt=(),
        limit=limit,
        seed=fields.integer("seed", -_SEEDS, _SEEDS - 1),
        ignore_eos=fields.boolean("ignore_eos"),
        stop=fields.texts("stop"),
        stop_tokens=fields.token_ids("stop_token_ids"),
        keep_stop=fields.boolean("include_stop_str_in_output"),
    )


def _min_tokens(fields: Fields, limit: int) -> int:
    shortest = fields.integer("min_tokens", 0) or 0
    if shortest > limit:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={limit}, got {shortest}.", "min_tokens")
    return shortest


def chat_text(body: Mapping[str, Any]) -> str:
    """The messages under a plain chat template; raises Refused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: Input should be a non-empty list", "messages")
    return "".join(f"{_line(message)}\n" for message in messages) + "assistant:"


def _line(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("messages: each must be an object with a role", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise invalid("messages: content must be a string or a list of parts", "messages")
    return f"{message['role']}: {content}"


def _check_tools(body: Mapping[str, Any]) -> None:
    """Tools need a function with a name; they do not change a simulated answer."""
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise invalid("tools: Input should be a valid list", "tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("tools: each must have a function with a name", "tools")


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """One text, one list of ids, or a list of either."""
    items = value if isinstance(value, list) and value and not is_token_ids(value) else [value]
    return tuple(prompt_of(item, "prompt") for item in items)


def prompt_of(item: Any, name: str) -> Prompt:
    """A text or a list of token ids; raises Refused."""
    if isinstance(item, str) and item:
        return Prompt(tokens.encode(item), item)
    if isinstance(item, list) and item and is_token_ids(item):
        return Prompt(tuple(item), tokens.decode(item))
    raise invalid(f"{name}: Input should be a non-empty string or list of token ids, or a list of these", name)
