"""TGI: `/`, `/generate`, `/generate_stream` (MindIE protocol page §2.1)."""

from typing import Any

from instances import tokens
from instances.answers import Wish, marked_length
from instances.mindie.ask import Ask, Call, Job, Token
from instances.mindie.families.form import comment, details, dump, sse
from instances.mindie.fields import Fields, recompute_ids

_DEFAULT_LIMIT = 20
_KEPT = "temperature top_k top_p repetition_penalty seed do_sample typical_p watermark truncate ignore_eos adapter_id"


class Tgi:
    """The TGI dialect."""

    name = "tgi"

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused. A recompute needs `origin_inputs`."""
        fields = Fields(call.body)
        parameters = fields.fields("parameters")
        stream = call.path == "/generate_stream" or (call.path == "/" and fields.boolean("stream"))
        parameters.check_sampling()
        parameters.check_mode(dmi=call.dmi, stop_words=False)
        for name in ("details", "return_full_text", "decoder_input_details"):
            parameters.boolean(name)
        done: tuple[int, ...] = ()
        if call.recompute:
            prompt, done = recompute_ids(call.body.get("inputs"), "inputs")
            text = fields.needed_text("origin_inputs")
        else:
            text = fields.needed_text("inputs")
            prompt = tokens.encode(text)
        wish = Wish(
            prompt=prompt,
            limit=parameters.limit("max_new_tokens") or _DEFAULT_LIMIT,
            seed=parameters.integer("seed", 0, 2**64 - 1),
            ignore_eos=parameters.boolean("ignore_eos"),
            stop=parameters.texts("stop"),
            natural_length=marked_length(text),
        )
        return Ask(call.path, stream, wish, text, call.body, done)

    def opening(self, job: Job) -> bytes:  # noqa: ARG002 - the family's interface
        """Nothing."""
        return b""

    def _event(self, job: Job, token: Token) -> dict[str, Any]:
        shown = {
            "id": [job.plan.tokens[token.index]],
            "text": job.plan.texts[token.index],
            "logprob": None,
            "special": None,
        }
        return {"token": shown, "generated_text": None, "details": None}

    def _generated(self, job: Job) -> str:
        full = Fields(job.ask.body).fields("parameters").boolean("return_full_text")
        return job.ask.prompt_text + job.plan.text if full else job.plan.text

    def piece(self, job: Job, token: Token) -> bytes:
        """A token."""
        return sse(self._event(job, token))

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The last token, the whole text and its details."""
        return (sse({**self._event(job, token), "generated_text": self._generated(job), "details": details(job)}),)

    def whole(self, job: Job) -> bytes:
        """The complete answer: an object, on `/` a list of one object."""
        answer = {"generated_text": self._generated(job), "details": details(job)}
        return dump([answer] if job.ask.path == "/" else answer)

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request."""
        parameters = Fields(job.ask.body).fields("parameters")
        return {
            "inputs": job.csv(),
            "origin_inputs": job.ask.prompt_text,
            "parameters": {
                "details": parameters.boolean("details"),
                "return_full_text": parameters.boolean("return_full_text"),
                "decoder_input_details": parameters.boolean("decoder_input_details"),
                "max_new_tokens": job.ask.wish.limit,
                **parameters.chosen(tuple(_KEPT.split())),
            },
            "stream": job.stream,
        }

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token."""
        return comment(text)
