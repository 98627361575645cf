"""What an engine's error answer says, whatever shape it has."""

import msgspec

MAX_MESSAGE_CHARS = 4096


def message_of(body: bytes, status: int) -> str:
    """The human text in an engine's error body, cut to `MAX_MESSAGE_CHARS`; a general sentence where there is none.

    Reads `{"error": {"message"}}` (OpenAI, vLLM, SGLang), `{"error": "text"}` (TGI, Triton, MindIE), `{"message"}`,
    `{"detail"}` (FastAPI) and plain text.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = body.decode("utf-8", "replace").strip()
    text = _text_in(value)
    return text[:MAX_MESSAGE_CHARS] if text else f"the engine refused the request with status {status}"


def _text_in(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            if key in value:
                return _text_in(value[key]) or (str(value[key]) if isinstance(value[key], list) else "")
    return ""
