"""Triton: generate (text) and infer (tokens) (MindIE protocol page §2.1)."""

from typing import Any

from instances import tokens
from instances.answers import Wish, marked_length
from instances.mindie.ask import Ask, Call, Job, Token
from instances.mindie.families.form import comment, dump, milliseconds
from instances.mindie.fields import Fields, recompute_ids, split_recompute, token_ids
from instances.mindie.refusal import invalid

_DEFAULT_LIMIT = 20
_KEPT = "temperature top_k top_p repetition_penalty seed do_sample typical_p watermark batch_size perf_stat ignore_eos"
_QUEUE_WAIT_MS = 10


def _limit(fields: Fields, parameters: Fields) -> int:
    """`parameters.max_new_tokens`; also the two other places where Triton clients put a limit."""
    return (
        parameters.limit("max_new_tokens", "max_tokens") or fields.limit("max_new_tokens", "max_tokens")
    ) or _DEFAULT_LIMIT


def _wish(fields: Fields, prompt: tuple[int, ...], text: str) -> Wish:
    parameters = fields.fields("parameters")
    parameters.check_sampling()
    return Wish(
        prompt=prompt,
        limit=_limit(fields, parameters),
        seed=parameters.integer("seed", 0, 2**64 - 1),
        ignore_eos=parameters.boolean("ignore_eos"),
        natural_length=marked_length(text),
    )


def _parameters(job: Job) -> dict[str, Any]:
    """`parameters` of a recompute request."""
    parameters = Fields(job.ask.body).fields("parameters")
    return {
        "details": parameters.boolean("details"),
        "max_new_tokens": job.ask.wish.limit,
        "priority": parameters.integer("priority", 1, 5) or 5,
        "timeout": parameters.integer("timeout", 1, 65535) or 600,
        "firstTokenCost": milliseconds(job.prefill_ms),
        "decodeTime": [milliseconds(value) for value in job.decode_ms],
        **parameters.chosen(tuple(_KEPT.split())),
    }


class _Triton:
    """What both calls share."""

    name = "triton"

    def opening(self, job: Job) -> bytes:  # noqa: ARG002 - the family's interface
        """Nothing."""
        return b""

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token."""
        return comment(text)

    def id(self, job: Job) -> str:
        """The caller's own id where there is one, else the routing id."""
        return job.ask.caller_id if job.ask.caller_id is not None else job.req_id

    def retry_id(self, job: Job) -> dict[str, Any]:
        """The caller's id for a recompute request."""
        return {} if job.ask.caller_id is None else {"id": job.ask.caller_id}


class TritonText(_Triton):
    """`/v2/models/{m}/generate` and `generate_stream`: the path alone says whether it is a stream."""

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused."""
        fields = Fields(call.body)
        fields.fields("parameters").check_mode(dmi=call.dmi, stop_words=True)
        done: tuple[int, ...] = ()
        if call.recompute:
            prompt, done = recompute_ids(call.body.get("text_input"), "text_input")
            text = tokens.decode(prompt)
        else:
            text = fields.needed_text("text_input")
            prompt = tokens.encode(text)
        stream = call.path.endswith("generate_stream")
        return Ask(call.path, stream, _wish(fields, prompt, text), text, call.body, done, fields.text("id"))

    def _answer(self, job: Job, text: str, details: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id(job),
            "model_name": job.model,
            "model_version": None,
            "text_output": text,
            "details": {
                **details,
                "first_token_cost": None,
                "decode_cost": None,
                "batch_size": 1,
                "queue_wait_time": _QUEUE_WAIT_MS,
            },
        }

    def _event(self, job: Job, token: Token, details: dict[str, Any]) -> bytes:
        event = self._answer(job, job.plan.texts[token.index], {**details, "generated_tokens": token.index + 1})
        took_ms = milliseconds(token.took_ms)
        event["prefillTime"] = took_ms if token.by_prefill else None
        event["decodeTime"] = None if token.by_prefill else took_ms
        return b"data:%b\n\n" % dump(event)  # no space after the colon

    def piece(self, job: Job, token: Token) -> bytes:
        """A token."""
        return self._event(job, token, {})

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The last token with the finish reason."""
        return (self._event(job, token, {"finish_reason": job.plan.finish}),)

    def whole(self, job: Job) -> bytes:
        """The complete answer."""
        details = {"finish_reason": job.plan.finish, "generated_tokens": len(job.plan)}
        return dump(
            {
                **self._answer(job, job.plan.text, details),
                "prefill_time": milliseconds(job.prefill_ms),
                "decode_time": [milliseconds(value) for value in job.decode_ms],
            }
        )

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request."""
        return {**self.retry_id(job), "text_input": job.csv(), "parameters": _parameters(job)}


class TritonTokens(_Triton):
    """`/v2/models/{m}/infer`: tokens in, tokens out, never a stream."""

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused."""
        fields = Fields(call.body)
        fields.fields("parameters").check_mode(dmi=call.dmi, stop_words=True)
        inputs = call.body.get("inputs")
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise invalid("inputs must be a list of one tensor")
        if inputs[0].get("datatype") != "UINT32":
            raise invalid("inputs[0].datatype must be UINT32")
        data = inputs[0].get("data")
        flat = data[0] if isinstance(data, list) and len(data) == 1 and isinstance(data[0], list) else data
        prompt = token_ids(flat, "inputs[0].data")
        done: tuple[int, ...] = ()
        shape = inputs[0].get("shape")
        if shape is not None and shape not in ([1, len(prompt)], [len(prompt)]):
            raise invalid("inputs[0].shape does not fit inputs[0].data")
        if call.recompute:
            prompt, done = split_recompute(prompt)
        text = tokens.decode(prompt)
        wish = _wish(fields, prompt, text)
        return Ask(
            call.path, stream=False, wish=wish, prompt_text=text, body=call.body, done=done, caller_id=fields.text("id")
        )

    def whole(self, job: Job) -> bytes:
        """The generated tokens as a tensor."""
        ids = list(job.plan.tokens)
        output = {"name": "output0", "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}
        return dump({"id": self.id(job), "outputs": [output]})

    def piece(self, job: Job, token: Token) -> bytes:  # noqa: ARG002 - the family's interface
        """There are no streams of tensors."""
        return b""

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:  # noqa: ARG002 - the family's interface
        """There are no streams of tensors."""
        return (self.whole(job),)

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request: numbers in the tensor."""
        ids = job.csv_ids()
        return {
            **self.retry_id(job),
            "inputs": [{"name": "input0", "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}],
            "outputs": [{"name": "output0"}],
            "parameters": _parameters(job),
        }
