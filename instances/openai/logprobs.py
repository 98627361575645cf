"""Log probabilities: made up, deterministic, the same on every instance."""

from collections.abc import Sequence
from typing import Any

from instances import tokens
from instances.openai.ask import Choice

_SPREAD = 1009


def of(token: int, alternative: int = 0) -> float:
    """The log probability of a token, or of its n-th alternative, which is less likely."""
    return -(token * 7919 % _SPREAD) / _SPREAD - alternative


def _alternatives(token: int, count: int) -> list[tuple[int, float]]:
    """The token and further ones: (id, log probability), most likely first."""
    return [(token + number, of(token, number)) for number in range(count)]


def chat(choice: Choice, first: int, end: int, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer for tokens first..end."""
    return {"content": [_entry(token, top) for token in choice.plan.tokens[first:end]]}


def _entry(token: int, top: int) -> dict[str, Any]:
    listed = [_shown(other, logprob) for other, logprob in _alternatives(token, top)]
    return {**_shown(token, of(token)), "top_logprobs": listed}


def _shown(token: int, logprob: float) -> dict[str, Any]:
    data = tokens.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def completion(ids: Sequence[int], top: int, offset: int, *, prompt_first: bool = False) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    Args:
        ids: tokens to report.
        top: alternatives for each.
        offset: where their text begins in the whole.
        prompt_first: whether the first token begins a prompt, which has no probability.
    """
    texts = [tokens.decode([token]) for token in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    listed: list[Any] = [{tokens.decode([o]): lp for o, lp in _alternatives(token, max(1, top))} for token in ids]
    logprobs: list[float | None] = [of(token) for token in ids]
    if prompt_first and ids:
        logprobs[0] = listed[0] = None
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": listed}


def prompt(ids: Sequence[int], top: int) -> list[Any]:
    """`prompt_logprobs`: nothing for the first token, then an object by token id for each."""
    return [None, *({str(o): _ranked(o, lp, rank) for rank, (o, lp) in _enumerated(token, top)} for token in ids[1:])]


def _enumerated(token: int, top: int) -> list[tuple[int, tuple[int, float]]]:
    return list(enumerate(_alternatives(token, max(1, top)), 1))


def _ranked(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": tokens.decode([token])}


def native(ids: Sequence[int], *, prompt_first: bool = False) -> list[list[Any]]:
    """SGLang's own form: `[log probability, id, null]` for each token."""
    listed: list[list[Any]] = [[of(token), token, None] for token in ids]
    if prompt_first and listed:
        listed[0][0] = None
    return listed


def native_top(ids: Sequence[int], top: int) -> list[list[list[Any]]]:
    """SGLang's alternatives of each token."""
    return [[[logprob, other, None] for other, logprob in _alternatives(token, top)] for token in ids]
