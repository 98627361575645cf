"""What an instance answers: a function of the prompt, the seeds and the limits, and of nothing else.

Prefill and decode instances with one seed agree on every token, so a test can say which token must come from which
side. A decode instance that has not got the right KV answers `wrong_plan`, which no test can take for the answer.
"""

import random
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from instances import tokens

_LENGTH_MARK = re.compile(r"\[\[length:(\d{1,6})\]\]")
SPLIT_CHARACTERS = "🙂🚀🌍🎉"
WRONG_TEXT = " <KV-LOST>"


@dataclass(frozen=True, slots=True)
class Wish:
    """What decides an answer.

    Attributes:
        prompt: token ids.
        limit: most tokens to generate.
        seed: the request's own seed, if it has one.
        ignore_eos: go on to the limit.
        stop: texts that end the answer; stop_tokens: ids that do.
        keep_stop: whether the stop text stays in the answer.
        natural_length: tokens before the end-of-text token; None: drawn.
    """

    prompt: tuple[int, ...]
    limit: int
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    keep_stop: bool = False
    natural_length: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole answer, token by token; `finish` is `stop` or `length`."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    finish: str

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    def __len__(self) -> int:
        return len(self.tokens)


def kv_digest(prompt: Sequence[int], seed: int) -> str:
    """Stands for the KV of a prompt: what decode must have pulled before it may give the right answer."""
    digest = blake2b(array("Q", prompt).tobytes(), digest_size=16)
    digest.update(seed.to_bytes(8, "big", signed=True))
    return digest.hexdigest()


def marked_length(prompt_text: str) -> int | None:
    """The natural length that `[[length:N]]` in a prompt asks for."""
    mark = _LENGTH_MARK.search(prompt_text)
    return int(mark.group(1)) if mark else None


def _draw(rng: random.Random, count: int) -> list[int]:
    """Plausible words: sentences with capitals and full stops, now and then a character split over two tokens."""
    drawn: list[int] = []
    sentence_left = 0
    while len(drawn) < count:
        if sentence_left == 0:
            sentence_left = rng.randint(6, 14)
            first = rng.choice(tokens.WORDS)
            drawn.append(tokens.word(("" if not drawn else " ") + first[:1].upper() + first[1:]))
        elif sentence_left == 1:
            drawn.append(tokens.word("."))
        elif rng.random() < 0.02:  # noqa: PLR2004 - about one split character in fifty tokens
            drawn.append(tokens.word(" "))
            drawn.extend(tokens.split_character(rng.choice(SPLIT_CHARACTERS)))
        else:
            drawn.append(tokens.word(" " + rng.choice(tokens.WORDS)))
        sentence_left -= 1
    return drawn[:count]


def plan(wish: Wish, seed: int, bounds: tuple[int, int]) -> Plan:
    """The right answer.

    Args:
        wish: prompt, limits and stop conditions.
        seed: the instances' common seed.
        bounds: shortest and longest natural length in tokens, where the wish does not fix it.
    """
    origin = f"{kv_digest(wish.prompt, seed)}:{wish.seed}"
    natural = wish.natural_length
    if natural is None:
        # of its own, so that the bounds change the length of an answer and not its words
        natural = random.Random(f"{origin}:length").randint(*bounds)
    ids = _draw(random.Random(origin), wish.limit if wish.ignore_eos else min(natural, wish.limit))
    finish = "length"
    if not wish.ignore_eos and natural < wish.limit:
        ids.append(tokens.EOS)
        finish = "stop"
    return _stopped(wish, ids, finish)


def _stopped(wish: Wish, ids: list[int], finish: str) -> Plan:
    for index, token in enumerate(ids):
        if token in wish.stop_tokens:
            ids, finish = ids[: index + 1], "stop"
            break
    texts = list(tokens.pieces(ids))
    cut = _first_stop("".join(texts), wish)
    if cut is None:
        return Plan(tuple(ids), tuple(texts), finish)
    end, shown = cut
    kept: list[str] = []
    seen = 0
    for text in texts:
        kept.append(text[: max(0, shown - seen)])
        seen += len(text)
        if seen >= end:
            break
    return Plan(tuple(ids[: len(kept)]), tuple(kept), "stop")


def _first_stop(text: str, wish: Wish) -> tuple[int, int] | None:
    """Where the earliest stop text ends, and how much of the answer is shown; None: there is none."""
    found = [(text.find(stop), len(stop)) for stop in wish.stop if stop and stop in text]
    if not found:
        return None
    start, length = min(found)
    return start + length, start + length if wish.keep_stop else start


def wrong_plan(right: Plan, known: int) -> Plan:
    """An answer without the right KV: the tokens that came from prefill, then unmistakable rubbish."""
    rubbish = tokens.encode(WRONG_TEXT)[0]
    count = max(1, len(right) - known)
    return Plan(right.tokens[:known] + (rubbish,) * count, right.texts[:known] + (WRONG_TEXT,) * count, "length")
