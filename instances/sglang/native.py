"""The native path `/generate`: bodies and answers."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from instances.answers import Wish
from instances.openai import logprobs
from instances.openai.ask import Ask, Choice, Job, Logprobs, Prompt
from instances.openai.bodies import prompt_of
from instances.openai.fields import Fields, is_token_ids
from instances.openai.refusal import Refused, invalid

_TOKENS = 128  # the default of max_new_tokens
_SEEDS = 2**63
_KNOWN = (
    "max_new_tokens min_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
    "presence_penalty repetition_penalty n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed"
)


def parse(body: Mapping[str, Any], most_tokens: int) -> Ask:
    """Read a body; raises Refused."""
    fields = Fields(body)
    texts, batched = _prompts(body)
    sampling = _sampling(body, len(texts))
    wishes, shortest = zip(*(_wish(params) for params in sampling), strict=True)
    prompts = tuple(dataclasses.replace(p, wish=w) for p, w in zip(texts, wishes, strict=True))
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest >= most_tokens:
        raise invalid(f"The input ({longest} tokens) is longer than the model's context length ({most_tokens} tokens).")
    wanted = fields.boolean("return_logprob")
    top = fields.integer("top_logprobs_num", 0) or 0
    start = fields.integer("logprob_start_len", -1)
    return Ask(
        body=body,
        prompts=prompts,
        wish=wishes[0],
        batched=batched,
        stream=fields.boolean("stream"),
        n=Fields(sampling[0]).integer("n", 1, 128) or 1,
        min_tokens=min(shortest),
        logprobs=Logprobs(top if wanted else None, None, -1 if start is None else start),
    )


def _prompts(body: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of several."""
    given = [name for name in ("text", "input_ids") if body.get(name) is not None]
    if len(given) != 1:
        raise invalid("Either text or input_ids should be provided, and not both.")
    value = body[given[0]]
    batched = isinstance(value, list) and not (given[0] == "input_ids" and is_token_ids(value) and value)
    items = value if batched else [value]
    if not items or any(isinstance(item, str) != (given[0] == "text") for item in items):
        raise invalid(f"{given[0]}: Input should be one prompt or a non-empty list of prompts")
    return [prompt_of(item, given[0]) for item in items], batched


def _sampling(body: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Sampling parameters of each prompt; raises Refused for a name that does not exist."""
    value = body.get("sampling_params")
    each = value if isinstance(value, list) else [value or {}] * count
    if len(each) != count or not all(isinstance(params, dict) for params in each):
        raise invalid("sampling_params: Input should be an object, or a list of one for each prompt")
    known = _KNOWN.split()
    unknown = sorted(name for params in each for name in params if name not in known)
    if unknown:
        raise invalid(f"SamplingParams.__init__() got an unexpected keyword argument '{unknown[0]}'")
    return each


def _wish(params: dict[str, Any]) -> tuple[Wish, int]:
    """(limits and stop conditions, shortest answer)."""
    fields = Fields(params)
    fields.check_sampling()
    given = fields.integer("max_new_tokens", 0)
    limit = _TOKENS if given is None else given
    shortest = fields.integer("min_new_tokens", 0) or 0
    if shortest > limit:
        raise invalid(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {shortest}.")
    wish = Wish(
        prompt=(),
        limit=max(1, limit),
        seed=fields.integer("sampling_seed", -_SEEDS, _SEEDS - 1),
        ignore_eos=fields.boolean("ignore_eos"),
        stop=fields.texts("stop"),
        stop_tokens=fields.token_ids("stop_token_ids"),
        keep_stop=fields.boolean("no_stop_trim"),
    )
    return wish, shortest


class Native:
    """Writes answers: each event of a stream has the whole text so far.

    Args:
        prompt_logprobs: whether log probabilities of the prompt are there: on decode they are not (§5).
    """

    def __init__(self, *, prompt_logprobs: bool) -> None:
        self._prompt_logprobs = prompt_logprobs

    def opening(self, job: Job, choice: Choice) -> list[Any]:  # noqa: ARG002 - the writers' interface
        """Nothing."""
        return []

    def token(self, job: Job, choice: Choice) -> list[Any]:
        """Everything so far."""
        return [self._event(job, choice, choice.finish if choice.is_last(choice.sent - 1) else None)]

    def closing(self, job: Job) -> list[Any]:  # noqa: ARG002 - the writers' interface
        """Nothing."""
        return []

    def error(self, job: Job, refused: Refused) -> Any:
        """An event without text, whose finish reason tells the error."""
        reason = {"type": "abort", "message": refused.text, "status_code": refused.status}
        return {"text": "", "meta_info": {"id": job.id, "finish_reason": reason}}

    def empty(self, job: Job) -> Any:
        """An event without text."""
        return {"text": "", "meta_info": {"id": job.id, "finish_reason": None}}

    def whole(self, job: Job) -> Any:
        """One object, or a list for a batch."""
        made = [self._event(job, choice, choice.finish, indexed=False) for choice in job.choices]
        return made if _several(job) else made[0]

    def _event(self, job: Job, choice: Choice, finish: str | None, *, indexed: bool = True) -> dict[str, Any]:
        ids = choice.plan.tokens[: choice.sent]
        event = {"text": choice.text, "output_ids": list(ids), "meta_info": self._meta(job, choice, finish)}
        return {"index": choice.index, **event} if indexed and _several(job) else event

    def _meta(self, job: Job, choice: Choice, finish: str | None) -> dict[str, Any]:
        reason: dict[str, Any] | None = None
        if finish == "length":
            reason = {"type": "length", "length": choice.sent}
        elif finish is not None:
            reason = {"type": finish, "matched": None}
        meta: dict[str, Any] = {
            "id": f"{job.id}-{choice.index}" if _several(job) else job.id,
            "finish_reason": reason,
            "prompt_tokens": len(choice.prompt.tokens),
            "completion_tokens": choice.sent,
            "cached_tokens": choice.cached_tokens,
        }
        if reason is not None:
            meta["e2e_latency"] = round(time.monotonic() - job.began_s, 6)
        return {**meta, **self._logprobs(job, choice)}

    def _logprobs(self, job: Job, choice: Choice) -> dict[str, Any]:
        wanted, top = job.ask.logprobs, job.ask.logprobs.answer
        if top is None:
            return {}
        prompt, ids = choice.prompt.tokens, choice.plan.tokens[: choice.sent]
        start = len(prompt) - 1 if wanted.prompt_start < 0 else wanted.prompt_start
        shown = prompt[start:] if self._prompt_logprobs else ()
        listed: dict[str, Any] = {
            "input_token_logprobs": logprobs.native(shown, prompt_first=True),
            "output_token_logprobs": logprobs.native(ids),
        }
        if top:
            listed["input_top_logprobs"] = logprobs.native_top(shown, top)
            listed["output_top_logprobs"] = logprobs.native_top(ids, top)
        if not self._prompt_logprobs:
            del listed["input_token_logprobs"]
            listed.pop("input_top_logprobs", None)
        return listed


def _several(job: Job) -> bool:
    return job.ask.batched or job.ask.n > 1
