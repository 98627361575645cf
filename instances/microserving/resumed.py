"""Answers that go on where their prompt stops: a prompt that ends with the beginning of an answer gets its rest.

A real model does that by itself; a simulated answer is drawn from its prompt as a whole, so the place where the answer
begins must be found: at a capital word of the vocabulary that no space precedes.
"""

import dataclasses
import re
from collections.abc import Iterator

from instances import answers, tokens
from instances.answers import Plan, Wish

_MOST_PLACES = 32
_Begun = str | tuple[int, ...]
_FIRST_WORDS = frozenset(word[:1].upper() + word[1:] for word in tokens.WORDS)
_CAPITAL = re.compile(r"(?=((?:[A-Z]|[^\W\x00-\x7f])\w*))")


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """What is still to be generated. `carried`: tokens of the same answer that the prompt has already."""

    plan: Plan
    carried: int = 0


def rest_of(wish: Wish, text: str, seed: int, bounds: tuple[int, int], *, from_ids: bool) -> Rest:
    """The right answer to a prompt, or the rest of it.

    Args:
        wish: prompt and limits; the limit counts what is still to be generated.
        text: of the prompt.
        seed: the instances' common seed.
        bounds: shortest and longest natural answer.
        from_ids: the prompt was given as token ids.
    """
    for origin, begun in _origins(wish.prompt) if from_ids else _text_origins(text):
        found = _continued(dataclasses.replace(wish, prompt=origin), begun, seed, bounds)
        if found is not None:
            return found
    natural = answers.marked_length(text)
    return Rest(answers.plan(dataclasses.replace(wish, natural_length=natural), seed, bounds))


def _text_origins(text: str) -> Iterator[tuple[tuple[int, ...], _Begun]]:
    places = [
        match.start()
        for match in _CAPITAL.finditer(text)
        if match.start() and text[match.start() - 1] != " " and match.group(1) in _FIRST_WORDS
    ]
    for place in places[-_MOST_PLACES:]:
        yield tokens.encode(text[:place]), text[place:]


def _origins(prompt: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], _Begun]]:
    places = [at for at, token in enumerate(prompt) if at and tokens.decode((token,)) in _FIRST_WORDS]
    for place in places[-_MOST_PLACES:]:
        yield prompt[:place], prompt[place:]
        yield prompt[:place], tokens.decode(prompt[place:])


def _continued(wish: Wish, begun: _Begun, seed: int, bounds: tuple[int, int]) -> Rest | None:
    """The rest, if `begun` is the beginning of the answer to the wish's prompt."""
    wish = dataclasses.replace(wish, natural_length=answers.marked_length(tokens.decode(wish.prompt)))
    # a split character takes two tokens
    enough = dataclasses.replace(wish, limit=wish.limit + 2 * len(begun))
    plan = answers.plan(enough, seed, bounds)
    carried = _tokens_of(plan, begun) if isinstance(begun, str) else _same(plan, begun)
    if carried is None:
        return None
    whole = answers.plan(dataclasses.replace(wish, limit=wish.limit + carried), seed, bounds)
    return Rest(Plan(whole.tokens[carried:], whole.texts[carried:], whole.finish), carried)


def _same(plan: Plan, begun: tuple[int, ...]) -> int | None:
    """The length of `begun`, if the answer begins with these tokens and goes on."""
    return len(begun) if len(plan) > len(begun) and plan.tokens[: len(begun)] == begun else None


def _tokens_of(plan: Plan, begun: str) -> int | None:
    """How many tokens of the answer make up `begun`; None if it does not begin so, or nothing would be left."""
    length = 0
    for count, text in enumerate(plan.texts):
        if length == len(begun):
            return count
        if not begun.startswith(text, length):
            return None
        length += len(text)
    return None
