"""Valid requests: what the engine is asked for."""

import uuid
from dataclasses import dataclass, field

from instances import tokens
from instances.answers import Wish
from instances.faults import Chosen
from instances.microserving.bodies import Chat, Completion, DisaggConfig
from instances.microserving.refusal import bad_request, failed

_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Ask:
    """One engine request.

    Attributes:
        user: the engine request id.
        wish: prompt, limits and stop conditions.
        text: of the prompt.
        from_ids: the prompt was given as token ids.
        n: sequences.
        special: the engine's metrics are asked for, not an answer.
        disagg: which part of a disaggregated request this is.
        chosen: faults of the request.
    """

    user: str
    wish: Wish
    text: str
    from_ids: bool = False
    n: int = 1
    special: bool = False
    disagg: DisaggConfig | None = None
    chosen: Chosen = field(default_factory=Chosen)

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.wish.prompt


def ask_of(body: Completion | Chat, most_tokens: int, chosen: Chosen) -> Ask:
    """Read a body; raises Refused.

    Args:
        body: valid as such.
        most_tokens: longest prompt, and longest sequence.
        chosen: faults of the request.
    """
    given = body.text if isinstance(body, Chat) else _prompt(body)
    ids = tokens.encode(given) if isinstance(given, str) else tuple(given)
    if len(ids) > most_tokens:
        raise bad_request(
            f"Request prompt has {len(ids)} tokens in total, larger than the model input length limit {most_tokens}."
        )
    if not ids or not all(0 <= token <= tokens.MAX_TOKEN for token in ids):
        raise failed("the prompt has no tokens, or ids that cannot be")
    _check_generation(body)
    debug = body.debug_config
    wish = Wish(
        prompt=ids,
        limit=_limit(body.max_tokens, most_tokens - len(ids)),
        seed=body.seed,
        ignore_eos=debug is not None and debug.ignore_eos,
        stop=body.stops,
    )
    return Ask(
        user=body.user
        if body.user is not None
        else f"{'chatcmpl' if isinstance(body, Chat) else 'cmpl'}-{uuid.uuid4().hex}",
        wish=wish,
        text=given if isinstance(given, str) else tokens.decode(ids),
        from_ids=not isinstance(given, str),
        n=body.n,
        special=debug is not None and debug.special_request is not None,
        disagg=debug.disagg_config if debug is not None else None,
        chosen=chosen,
    )


def _prompt(body: Completion) -> str | list[int]:
    if body.best_of != 1:
        raise bad_request('Request fields "best_of" are not supported right now.')
    if body.prompt == []:
        raise bad_request("Invalid request prompt []")
    return body.prompt


def _check_generation(body: Completion | Chat) -> None:
    """What the engine's own configuration asserts."""
    if body.n < 1 or (body.temperature is not None and body.temperature < 0):
        raise failed("n or temperature out of range")
    if body.top_p is not None and not 0 <= body.top_p <= 1:
        raise failed("top_p out of range")
    if body.seed is not None and not -_SEEDS <= body.seed < _SEEDS:
        raise failed("seed out of range")


def _limit(wanted: int | None, room: int) -> int:
    """Tokens to generate: null and negative are without a bound of their own; the first token comes in any case."""
    return max(1, room if wanted is None or wanted < 0 else min(wanted, room))
