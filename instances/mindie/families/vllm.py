"""vLLM's own `/generate` (MindIE protocol page §2.1)."""

from typing import Any

from instances import tokens
from instances.answers import Wish, marked_length
from instances.mindie.ask import Ask, Call, Job, Token
from instances.mindie.families.form import dump
from instances.mindie.fields import Fields, recompute_ids

_DEFAULT_LIMIT = 16
_KEPT = "temperature top_k top_p presence_penalty frequency_penalty repetition_penalty seed ignore_eos"


class Vllm:
    """The vLLM dialect: JSON pieces that end with NUL."""

    name = "vllm"

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused. A recompute needs `origin_inputs`."""
        fields = Fields(call.body)
        fields.check_sampling()
        fields.check_mode(dmi=call.dmi, stop_words=False)
        done: tuple[int, ...] = ()
        if call.recompute:
            prompt, done = recompute_ids(call.body.get("prompt"), "prompt")
            text = fields.needed_text("origin_inputs")
        else:
            text = fields.needed_text("prompt")
            prompt = tokens.encode(text)
        wish = Wish(
            prompt=prompt,
            limit=fields.limit("max_tokens") or _DEFAULT_LIMIT,
            seed=fields.integer("seed", 0, 2**64 - 1),
            ignore_eos=fields.boolean("ignore_eos"),
            stop=fields.texts("stop"),
            natural_length=marked_length(text),
        )
        return Ask(call.path, fields.boolean("stream"), wish, text, call.body, done)

    def opening(self, job: Job) -> bytes:  # noqa: ARG002 - the family's interface
        """Nothing."""
        return b""

    def piece(self, job: Job, token: Token) -> bytes:
        """The token's text; the NUL is part of what the client receives."""
        return dump({"text": [job.plan.texts[token.index]]}) + b"\0"

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The same as any other piece."""
        return (self.piece(job, token),)

    def whole(self, job: Job) -> bytes:
        """Prompt and answer in one text."""
        return dump({"text": [job.ask.prompt_text + job.plan.text]})

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request; the limit is left out where it is the default."""
        limit = job.ask.wish.limit
        return {
            "prompt": job.csv(),
            "origin_inputs": job.ask.prompt_text,
            "stream": job.stream,
            **({} if limit == _DEFAULT_LIMIT else {"max_tokens": limit}),
            **Fields(job.ask.body).chosen(tuple(_KEPT.split())),
            "model": "None",
        }

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token."""
        return dump({"text": [text.decode("utf-8", "replace")]}) + b"\0"
