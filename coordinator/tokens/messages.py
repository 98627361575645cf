"""Messages of a chat as templates expect them: text content, and arguments of tool calls as objects."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from coordinator.core.errors import BadRequest

_TEXT: Final = frozenset(("text", "input_text", "output_text", "refusal"))


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Messages for a template.

    Text parts of a content are joined by line ends, as vLLM does it; a missing content becomes empty. Arguments of
    tool calls, which clients send as JSON text, become objects.

    Raises:
        BadRequest: a part is no text (an image, say), or arguments are no JSON object.
    """
    return [_plain(at, message) for at, message in enumerate(messages)]


def _plain(at: int, message: Mapping[str, object]) -> dict[str, Any]:
    plain: dict[str, Any] = {**message, "content": _content(at, message.get("content"))}
    calls = plain.get("tool_calls")
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [_call(at, call) for call in calls]
    elif "tool_calls" in plain:
        del plain["tool_calls"]  # templates ask whether the key is there
    return plain


def _content(at: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"`messages[{at}].content` must be a string or a list of parts")
    return "\n".join(_part(at, part) for part in content)


def _part(at: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in _TEXT:
        raise BadRequest(f"`messages[{at}].content` has a part that is no text: only parts of type text are taken here")
    if not isinstance(text, str):
        raise BadRequest(f"`messages[{at}].content` has a text part without text")
    return text


def _call(at: int, call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(given, str):
        return call
    try:
        arguments = msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"`messages[{at}].tool_calls` has arguments that are no JSON object") from None
    return {**call, "function": {**function, "arguments": arguments}}
