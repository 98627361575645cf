"""From the outputs that instances push to the client's answer: xLLM makes the text itself (xLLM protocol page §4.2)."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from coordinator.api.writers import LENGTH, STOP, TokenLogprob, Usage, Writer
from coordinator.core.out import Out
from coordinator.engines.token_answers import TokenAnswers
from coordinator.engines.token_prompts import TokenRequest

if TYPE_CHECKING:
    from coordinator.wire.protobuf.xllm_pb2 import LogProb, LogProbData, OutputUsage, SequenceOutput


class PushedAnswer:
    """The answers to one request, in one attempt to serve it."""

    def __init__(self, asked: TokenRequest, writer: Writer, out: Out) -> None:
        self._answers = TokenAnswers(asked, writer, out)
        self._wanted = range(asked.generation.n)
        self._most = asked.generation.max_tokens
        self._stream = asked.generation.stream

    def take(self, outputs: "Iterable[SequenceOutput]", now_s: float) -> None:
        """Take what is new. Hot. A sequence that was not asked for is passed over."""
        for output in outputs:
            if output.index in self._wanted:
                self._answers.text(
                    output.index,
                    output.text,
                    output.token_ids,
                    now_s,
                    logprobs=[_logprob(one) for one in output.logprobs] if output.logprobs else (),
                    finish_reason=output.finish_reason or None,
                )

    def end(self, outputs: "Sequence[SequenceOutput]", usage: "OutputUsage | None", now_s: float) -> None:
        """Take the last message. A sequence whose end it does not tell ends with the request.

        Raises:
            ValueError: an answer that is no stream is not there; nothing was sent.
        """
        if not self._stream and not {output.index for output in outputs}.issuperset(self._wanted):
            raise ValueError(f"{len(outputs)} outputs where {len(self._wanted)} are wanted")
        self.take(outputs, now_s)
        used = self._usage(usage)
        at_limit = self._most is not None and used.completion_tokens >= self._most * len(self._wanted)
        for index in self._wanted:
            self._answers.text(index, "", (), now_s, finish_reason=LENGTH if at_limit else STOP)
        self._answers.end(used)

    def _usage(self, told: "OutputUsage | None") -> Usage:
        counted = self._answers.usage()
        if told is None:
            return counted
        return Usage(
            told.num_prompt_tokens or counted.prompt_tokens,
            told.num_generated_tokens or counted.completion_tokens,
            told.num_cached_tokens or None,
        )


def _logprob(told: "LogProb") -> TokenLogprob:
    return _token(told.log_prob_data)._replace(top=tuple(map(_token, told.top_logprobs)))


def _token(told: "LogProbData") -> TokenLogprob:
    return TokenLogprob(told.token_id, told.token, told.logprob)
