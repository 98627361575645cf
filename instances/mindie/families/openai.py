"""OpenAI chat and completions (MindIE protocol page §2.1)."""

from typing import Any

from instances import tokens
from instances.answers import Wish, marked_length
from instances.mindie.ask import Ask, Call, Job, Token
from instances.mindie.families.form import comment, dump, sse
from instances.mindie.fields import Fields, recompute_ids, token_ids
from instances.mindie.refusal import invalid

DONE = b"data: [DONE]\n\n"
_SEEDS = 2**64 - 1
_KEPT = (
    "max_tokens max_completion_tokens presence_penalty frequency_penalty seed temperature top_p repetition_penalty "
    "top_k stop stop_token_ids include_stop_str_in_output chat_template_kwargs skip_special_tokens ignore_eos "
    "logprobs top_logprobs response_format stream_options"
)


class _OpenAi:
    """What chat and completions share."""

    name = "openai"
    prompt_key = ""

    def prompt(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Prompt tokens of a request that is not a recompute."""
        raise NotImplementedError

    def parse(self, call: Call) -> Ask:
        """Read a body; raises Refused."""
        fields = Fields(call.body)
        fields.needed_text("model")
        stream = fields.boolean("stream")
        if call.body.get("stream_options") is not None:
            fields.fields("stream_options").boolean("include_usage")
            if not stream:
                raise invalid("stream_options is only allowed when stream is true")
        fields.check_sampling()
        fields.check_mode(dmi=call.dmi, stop_words=True)
        done: tuple[int, ...] = ()
        if call.recompute:
            prompt, done = recompute_ids(call.body.get(self.prompt_key), self.prompt_key)
        else:
            prompt = self.prompt(call.body)
        text = tokens.decode(prompt)
        stop_ids = call.body.get("stop_token_ids")
        wish = Wish(
            prompt=prompt,
            limit=fields.limit("max_completion_tokens", "max_tokens") or call.limit,
            seed=fields.integer("seed", 0, _SEEDS),
            ignore_eos=fields.boolean("ignore_eos"),
            stop=fields.texts("stop"),
            stop_tokens=token_ids(stop_ids, "stop_token_ids") if stop_ids else (),
            keep_stop=fields.boolean("include_stop_str_in_output"),
            natural_length=marked_length(text),
        )
        return Ask(call.path, stream, wish, text, call.body, done)

    def usage(self, job: Job) -> dict[str, Any]:
        """The usage object."""
        prompt, answer = len(job.ask.wish.prompt), len(job.plan)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
        }
        if job.cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": job.cached_tokens}
        return usage

    def answer(self, job: Job, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """The object around one choice."""
        return {"id": job.req_id, "object": kind, "created": job.created, "model": job.model, "choices": [choice]}

    def retry(self, job: Job) -> dict[str, Any]:
        """Body of a recompute request; the prompt key holds a string, for chat too."""
        body = job.ask.body
        kept = Fields(body).chosen(tuple(_KEPT.split()))
        return {"model": body["model"], self.prompt_key: job.csv(), "stream": job.stream, **kept}

    def filler(self, text: bytes) -> bytes:
        """A stream piece without a token."""
        return comment(text)


class Chat(_OpenAi):
    """`/v1/chat/completions`."""

    prompt_key = "messages"

    def prompt(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Tokens of the messages under a plain chat template."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise invalid("messages must be a non-empty list")
        return tokens.encode("".join(f"{_line(message)}\n" for message in messages) + "assistant:")

    def _chunk(self, job: Job, content: str, finish: str | None) -> dict[str, Any]:
        delta = {"role": "assistant", "content": content}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self.answer(job, "chat.completion.chunk", choice)

    def opening(self, job: Job) -> bytes:
        """The piece with a role and no content."""
        return sse(self._chunk(job, "", None))

    def piece(self, job: Job, token: Token) -> bytes:
        """A piece with content."""
        return sse(self._chunk(job, job.plan.texts[token.index], None))

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The last content with finish reason and usage, then the terminator."""
        chunk = self._chunk(job, job.plan.texts[token.index], job.plan.finish)
        return sse({**chunk, "usage": self.usage(job)}), DONE

    def whole(self, job: Job) -> bytes:
        """The complete answer."""
        message = {"role": "assistant", "content": job.plan.text, "tool_calls": []}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": job.plan.finish}
        return dump({**self.answer(job, "chat.completion", choice), "usage": self.usage(job)})


class Completions(_OpenAi):
    """`/v1/completions`."""

    prompt_key = "prompt"

    def prompt(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Tokens of one text, or the tokens that were sent."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return token_ids(prompt, "prompt")
        if not isinstance(prompt, str) or not prompt:
            raise invalid("prompt must be a non-empty string or a list of token ids")
        return tokens.encode(prompt)

    def _choice(self, job: Job, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "stop_reason": None, "finish_reason": finish}
        return self.answer(job, "text_completion", choice)

    def opening(self, job: Job) -> bytes:  # noqa: ARG002 - the family's interface
        """Nothing."""
        return b""

    def piece(self, job: Job, token: Token) -> bytes:
        """A piece of text."""
        return sse(self._choice(job, job.plan.texts[token.index], None))

    def last(self, job: Job, token: Token) -> tuple[bytes, ...]:
        """The last text with finish reason and usage, then the terminator."""
        chunk = self._choice(job, job.plan.texts[token.index], job.plan.finish)
        return sse({**chunk, "usage": self.usage(job)}), DONE

    def whole(self, job: Job) -> bytes:
        """The complete answer."""
        return dump({**self._choice(job, job.plan.text, job.plan.finish), "usage": self.usage(job)})


def _line(message: Any) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise invalid("each message must be an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text", "") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise invalid("each message must have content")
    return f"{message['role']}: {content}"
