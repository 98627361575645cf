"""An engine's list of models (OpenAI `GET /v1/models`)."""

import msgspec


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


_LIST = msgspec.json.Decoder(_ModelList)


def first_model(body: bytes) -> str | None:
    """`data[0].id`; None for an empty list and for anything else."""
    try:
        names = _LIST.decode(body).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return names[0].id if names else None
