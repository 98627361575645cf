"""MindIE native: `/infer` and `/infer_token` (MindIE protocol page §2.1)."""

from typing import Any

from instances import tokens
from instances.answers import Wish, marked_length
from instances.mindie.ask import Ask, Call, Job, Token
from instances.mindie.families.form import comment, details, dump, milliseconds, sse
from instances.mindie.fields import Fields, recompute_ids, token_ids
from instances.mindie.refusal import invalid

_DEFAULT_LIMIT = 20
_KEPT = "temperature top_k top_p repetition_penalty seed do_sample typical_p watermark ignore_eos"


class Native:
    """MindIE's own dialect: a text in `inputs`, or tokens in `input_id`."""

    name = "native"

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused. A recompute always has `inputs`, on `/infer_token` too."""
        fields = Fields(call.body)
        parameters = fields.fields("parameters")
        parameters.check_sampling()
        parameters.check_mode(dmi=call.dmi, stop_words=True)
        prompt, done = self._prompt(call, fields)
        text = tokens.decode(prompt)
        wish = Wish(
            prompt=prompt,
            limit=parameters.limit("max_new_tokens") or _DEFAULT_LIMIT,
            seed=parameters.integer("seed", 0, 2**64 - 1),
            ignore_eos=parameters.boolean("ignore_eos"),
            natural_length=marked_length(text),
        )
        return Ask(call.path, fields.boolean("stream"), wish, text, call.body, done)

    def _prompt(self, call: Call, fields: Fields) -> tuple[tuple[int, ...], tuple[int, ...]]:
        text, ids = call.body.get("inputs"), call.body.get("input_id")
        if call.recompute:
            return recompute_ids(text, "inputs")
        if (text is None) == (ids is None):
            raise invalid("exactly one of inputs and input_id must be given")
        if call.path == "/infer_token" and ids is None:
            raise invalid("input_id must be given")
        if ids is not None:
            return token_ids(ids, "input_id"), ()
        return tokens.encode(fields.needed_text("inputs")), ()

    def opening(self, job: Job) -> bytes:  # noqa: ARG002 - the family's interface
        """Nothing."""
        return b""

    def _event(self, job: Job, token: Token, text: str | None) -> dict[str, Any]:
        took_ms = milliseconds(token.took_ms)
        return {
            "prefill_time": took_ms if token.by_prefill else None,
            "decode_time": None if token.by_prefill else took_ms,
            "token": {"id": [job.plan.tokens[token.index]], "text": text},
        }

    def piece(self, job: Job, token: Token) -> bytes:
        """A token."""
        return sse(self._event(job, token, job.plan.texts[token.index]))

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The last token: its own text is null, the whole text stands beside it."""
        return (sse({**self._event(job, token, None), "generated_text": job.plan.text, "details": details(job)}),)

    def whole(self, job: Job) -> bytes:
        """The complete answer."""
        return dump({"generated_text": job.plan.text, "details": details(job)})

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request."""
        parameters = Fields(job.ask.body).fields("parameters")
        return {
            "inputs": job.csv(),
            "stream": job.stream,
            "parameters": {
                "max_new_tokens": job.ask.wish.limit,
                "priority": parameters.integer("priority", 1, 5) or 5,
                "timeout": parameters.integer("timeout", 1, 65535) or 600,
                "details": parameters.boolean("details"),
                **parameters.chosen(tuple(_KEPT.split())),
            },
        }

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token."""
        return comment(text)
