"""Chat over an engine call that only knows text: the model's template makes the prompt."""

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest
from coordinator.tokens import Tokenizer
from coordinator.wire.json_edit import Fields, given, is_true, number, text

CHAT = "/v1/chat/completions"
TAKEN = (
    "model", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "n",
    "stream", "stream_options", "response_format", "debug_config", "ignore_eos",
)  # fmt: skip
"""Fields that mean the same in both."""
MOST_ALTERNATIVES = 5
_MESSAGES = msgspec.json.Decoder(list[dict[str, object]])
_ARGUMENTS = msgspec.json.Decoder(dict[str, object])


async def completion_fields(fields: Fields, tokenizer: Tokenizer | None) -> Fields:
    """A chat body as the body of a text completion.

    One that has a prompt already, because it goes on after a preempt, keeps it.

    Raises:
        BadRequest: it asks for what a completion cannot give, or there is no template.
    """
    if "messages" not in fields and given(fields.get("prompt")):
        return dict(fields)
    if tokenizer is None:
        raise BadRequest(
            "chat needs the model's chat template, and this model has no tokenizer here: use /v1/completions"
        )
    if given(fields.get("tools")) and text(fields.get("tool_choice")) != "none":
        raise BadRequest("`tools` are not served by these engines over a prefill and decode pair")
    taken = {name: fields[name] for name in TAKEN if name in fields}
    limit = fields.get("max_completion_tokens")
    limit = limit if given(limit) else fields.get("max_tokens")
    if limit is not None:
        taken["max_tokens"] = limit
    if is_true(fields.get("logprobs")):
        taken["logprobs"] = _alternatives(fields.get("top_logprobs"))
    prompt = await tokenizer.chat(_messages(fields.get("messages")), extra=_arguments(fields))
    return {**taken, "prompt": Raw(msgspec.json.encode(prompt))}


def _alternatives(value: Raw | None) -> Raw:
    count = int(number(value) or 0)
    if not 0 <= count <= MOST_ALTERNATIVES:
        raise BadRequest(f"`top_logprobs` must be 0 to {MOST_ALTERNATIVES}")
    return Raw(b"%d" % count)


def _messages(value: Raw | None) -> list[dict[str, object]]:
    try:
        messages = _MESSAGES.decode(value) if value is not None else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        messages = []
    if not messages:
        raise BadRequest("`messages` must be a list of messages")
    return messages


def _arguments(fields: Fields) -> dict[str, object]:
    value = fields.get("chat_template_kwargs")
    if not given(value) or value is None:
        return {}
    try:
        return _ARGUMENTS.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise BadRequest("`chat_template_kwargs` must be an object") from None
