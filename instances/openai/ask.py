"""A valid request, whatever body it came from, and its way through an instance."""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from instances import answers
from instances.answers import Plan, Wish

# seeds of further choices of one prompt: far enough from what people choose
_SEED_STEP = 1_000_003


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: token ids and their text; its own wish, where the prompts of a batch differ in that."""

    tokens: tuple[int, ...]
    text: str
    wish: Wish | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Which log probabilities are asked for: alternatives per token; None: none at all.

    Attributes:
        prompt_start: first prompt position that is reported (SGLang); -1: the last one only.
    """

    answer: int | None = None
    prompt: int | None = None
    prompt_start: int = -1


@dataclass(frozen=True, slots=True)
class Ask:
    """A valid request.

    Attributes:
        body: the JSON object as it came.
        batched: whether the prompts came as a list.
        n: choices for each prompt.
        wish: limits and stop conditions, for whichever prompt.
        min_tokens: shortest answer, the end-of-text token not counted.
        usage: whether a stream ends with a usage chunk; usage_always: whether every chunk carries it.
        echo: whether the answer begins with the prompt.
    """

    body: Mapping[str, Any]
    prompts: tuple[Prompt, ...]
    wish: Wish
    batched: bool = False
    stream: bool = False
    n: int = 1
    min_tokens: int = 0
    usage: bool = False
    usage_always: bool = False
    echo: bool = False
    logprobs: Logprobs = field(default_factory=Logprobs)

    @property
    def sequences(self) -> int:
        """How many answers are made."""
        return len(self.prompts) * self.n


@dataclass(slots=True)
class Choice:
    """One sequence of a request.

    Attributes:
        index: `choices[].index`.
        key: under which its KV is held.
        sent: tokens that exist.
        cached_tokens: prompt tokens that needed no prefill here.
        finish: the finish reason, or one that a fault or an abort put in its place.
    """

    index: int
    key: str
    prompt: Prompt
    plan: Plan
    sent: int = 0
    cached_tokens: int = 0
    finish: str = ""

    def __post_init__(self) -> None:
        self.finish = self.finish or self.plan.finish

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the whole sequence needs."""
        return len(self.prompt.tokens) + len(self.plan)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self.plan.texts[: self.sent])

    def is_last(self, token: int) -> bool:
        """Whether token number `token` (from 0) ends the answer."""
        return token >= len(self.plan) - 1


@dataclass(slots=True)
class Job:
    """A request at work. `extra`: further keys of an answer that is not a stream."""

    id: str
    model: str
    ask: Ask
    choices: list[Choice]
    created: int = field(default_factory=lambda: int(time.time()))
    began_s: float = field(default_factory=time.monotonic)
    extra: dict[str, Any] = field(default_factory=dict)

    def usage(self) -> dict[str, Any]:
        """The usage object for what there is so far; a prompt with several choices counts once."""
        firsts = self.choices[:: self.ask.n]
        prompt = sum(len(choice.prompt.tokens) for choice in firsts)
        done = sum(choice.sent for choice in self.choices)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
        return usage


def choices_of(ask: Ask, key: str, seed: int, bounds: tuple[int, int]) -> list[Choice]:
    """The sequences that a request asks for, each with its right answer.

    Args:
        ask: the request.
        key: of its KV; the sequences add their number.
        seed: the instances' common seed.
        bounds: shortest and longest natural answer.
    """
    made: list[Choice] = []
    for prompt in ask.prompts:
        for number in range(ask.n):
            base = prompt.wish or ask.wish
            own = base.seed if number == 0 else (base.seed or 0) + number * _SEED_STEP
            wish = dataclasses.replace(
                base, prompt=prompt.tokens, seed=own, natural_length=answers.marked_length(prompt.text)
            )
            made.append(Choice(len(made), f"{key}-{len(made)}", prompt, _plan(wish, ask.min_tokens, seed, bounds)))
    return made


def _plan(wish: Wish, min_tokens: int, seed: int, bounds: tuple[int, int]) -> Plan:
    plan = answers.plan(wish, seed, bounds)
    if plan.finish == "stop" and len(plan) <= min_tokens:
        longer = dataclasses.replace(wish, natural_length=min_tokens, stop=(), stop_tokens=())
        plan = answers.plan(longer, seed, bounds)
    return plan
