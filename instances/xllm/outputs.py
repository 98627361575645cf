"""What goes to the service: generations with their outputs, usage and status (xLLM protocol page §6)."""

from collections.abc import Iterable
from dataclasses import dataclass

from instances.answers import Plan
from instances.openai import logprobs
from instances.xllm import vocabulary
from instances.xllm.ask import Ask, Failed
from instances.xllm.proto.engine_pb2 import (
    DisaggStreamGeneration,
    GenerationStatus,
    LogProb,
    LogProbData,
    OutputUsage,
    RemoteToken,
    SequenceOutput,
)


@dataclass(slots=True)
class Sequence:
    """One sequence of an answer.

    Attributes:
        sent: tokens that exist.
        told: tokens whose text the service has; those between wait for the end of a character.
        over: whether its finish reason was told.
    """

    index: int
    plan: Plan
    sent: int = 0
    told: int = 0
    over: bool = False

    @property
    def complete(self) -> bool:
        """Whether all tokens exist."""
        return self.sent >= len(self.plan)

    def delta(self, ask: Ask) -> SequenceOutput | None:
        """What is new; None while it has no text."""
        first, self_text = self.told, "".join(self.plan.texts[self.told : self.sent])
        if not self_text:
            return None
        self.told = self.sent
        before = ask.prompt if ask.echo and first == 0 else ""
        return self._output(ask, first, before + self_text)

    def whole(self, ask: Ask) -> SequenceOutput:
        """All tokens that exist."""
        text = "".join(self.plan.texts[: self.sent])
        output = self._output(ask, 0, (ask.prompt if ask.echo else "") + text)
        if self.complete:
            output.finish_reason = self.plan.finish
        return output

    def end(self) -> SequenceOutput:
        """The finish reason, and no text."""
        self.over = True
        return SequenceOutput(index=self.index, finish_reason=self.plan.finish)

    def _output(self, ask: Ask, first: int, text: str) -> SequenceOutput:
        ids = self.plan.tokens[first : self.sent]
        return SequenceOutput(
            index=self.index,
            text=text,
            token_ids=[vocabulary.to_wire(token) for token in ids],
            logprobs=[_logprob(token, ask.top_logprobs) for token in ids] if ask.logprobs else [],
        )


def _data(token: int, value: float) -> LogProbData:
    data = vocabulary.token_bytes(token)
    try:
        shown, complete = data.decode(), True
    except UnicodeDecodeError:
        shown, complete = data.decode("utf-8", "replace"), False
    return LogProbData(token=shown, token_id=vocabulary.to_wire(token), logprob=value, finished_token=complete)


def _alternatives(token: int, count: int) -> list[tuple[int, float]]:
    """The token and others of the vocabulary, most likely first."""
    wire = vocabulary.to_wire(token)
    others = [vocabulary.from_wire((wire + number) % vocabulary.SIZE) for number in range(count)]
    return [(other, logprobs.of(token, number)) for number, other in enumerate(others)]


def _logprob(token: int, top: int) -> LogProb:
    listed = [_data(other, value) for other, value in _alternatives(token, top)]
    return LogProb(log_prob_data=_data(token, logprobs.of(token)), top_logprobs=listed)


def remote_token(ask: Ask, token: int, ttft_s: float) -> RemoteToken:
    """The first token as prefill tells decode of it."""
    message = RemoteToken(token_id=vocabulary.to_wire(token), time_to_first_token_latency_seconds=ttft_s)
    if ask.logprobs:
        message.has_logprob, message.logprob = True, logprobs.of(token)
        for other, value in _alternatives(token, ask.top_logprobs):
            message.top_tokens.append(vocabulary.to_wire(other))
            message.top_logprobs.append(value)
    return message


def generation(ask: Ask, outputs: Iterable[SequenceOutput | None]) -> DisaggStreamGeneration:
    """A message with what is new."""
    shown = [output for output in outputs if output is not None]
    return DisaggStreamGeneration(req_id=ask.req_id, service_req_id=ask.service_req_id, outputs=shown)


def usage(ask: Ask, sequences: Iterable[Sequence], cached_tokens: int) -> OutputUsage:
    """Token counts so far."""
    generated = sum(sequence.sent for sequence in sequences)
    prompt = len(ask.tokens)
    return OutputUsage(
        num_prompt_tokens=prompt,
        num_generated_tokens=generated,
        num_total_tokens=prompt + generated,
        num_cached_tokens=cached_tokens,
    )


def finished(
    ask: Ask, outputs: Iterable[SequenceOutput], sequences: Iterable[Sequence], cached_tokens: int
) -> DisaggStreamGeneration:
    """The last message."""
    message = generation(ask, outputs)
    message.gen_status.CopyFrom(GenerationStatus(status_code=0))
    message.usage.CopyFrom(usage(ask, sequences, cached_tokens))
    message.finished = True
    return message


def failed(ask_ids: tuple[str, str], error: Failed) -> DisaggStreamGeneration:
    """The message that a request failed; `ask_ids`: the engine's id and the service's."""
    return DisaggStreamGeneration(
        req_id=ask_ids[0],
        service_req_id=ask_ids[1],
        gen_status=GenerationStatus(status_code=error.code, status_msg=error.text),
    )
