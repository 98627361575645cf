"""The base class of orchestration patterns."""

from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from coordinator.tokens import Tokenizer

from .microserving_entrypoints import PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, StartGenerateRequest
from .openai_api_protocol import CompletionRequest, CompletionResponse
from .run import DECODE, PREFILL, Preference, Run, Server

COMPLETIONS = "/v1/completions"
GENERATE = "/microserving/start_generate"
LEAST_FACTOR = 1e-5


class Router:
    """Turns one completion request into calls to engines; override `translate_request`.

    The coordinator makes one object for each attempt of each request, so `self` is never shared: whatever routers have
    to keep for each other goes into `self.shared`. The coordinator chooses a prefill and a decode instance beforehand
    and holds their load; it watches the deadlines, and where the client leaves, `translate_request` is cancelled.

    Attributes:
        tokenize_prompts: whether a text prompt comes as token ids, as in MLC-LLM; the model needs a tokenizer then.
            Set it to False for patterns that do with text.
        run: the attempt. Set by the coordinator before `translate_request`.
    """

    tokenize_prompts = True
    run: Run

    async def translate_request(
        self,
        request: CompletionRequest,
        request_id: str,  # noqa: ARG002  # it is `request.user` already
    ) -> AsyncGenerator[CompletionResponse | None, Any]:
        """Serve a request: yield its responses, or None once decode has preempted it.

        After None the request is placed again, and `translate_request` runs anew with what is left to do: the generated
        text is part of the prompt then. Nothing that was sent is sent twice.

        Args:
            request: the client's request; `user` is `request_id`, `debug_config` is there.
            request_id: a fresh id for the engines.

        Here: prefill and decode over the pair, or one engine alone (as the reference router does it).
        """
        calls = self._alone(request) if self.run.alone else self._over_pair(request)
        async with aclosing(calls):
            async for response in calls:
                yield response

    # --- where

    @property
    def prefill(self) -> Server:
        """Where the prompt is to be computed."""
        return self.run.prefill

    @property
    def decode(self) -> Server:
        """Where the answer is to be generated."""
        return self.run.decode

    @property
    def server_urls(self) -> list[str]:
        """URLs of prefill, at 0, and of decode, at 1."""
        return [self.prefill.url, self.decode.url]

    @property
    def device_id_starts(self) -> list[int]:
        """The first PEs of the two (`recv_rank`), in the same order; 0 for one that has none."""
        return [self.prefill.recv_rank or 0, self.decode.recv_rank or 0]

    @property
    def num_servers(self) -> int:
        """How many `server_urls` there are."""
        return len(self.server_urls)

    @property
    def headers(self) -> dict[str, str]:
        """Headers for calls of a pattern's own."""
        return {"Content-Type": "application/json"}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one; its `encode` is a coroutine."""
        return self.run.tokenizer

    @property
    def pd_balance_factor(self) -> float:
        """The configuration's share of the prompt that decode computes itself."""
        return self.run.balance

    @property
    def shared(self) -> MutableMapping[str, Any]:
        """What routers of one class keep for each other, in one process of the coordinator."""
        return self.run.shared

    def servers(self, role: str) -> Sequence[Server]:
        """Who could be `prefill` or `decode` in this attempt, those with the least to do first."""
        return self.run.servers(role)

    @asynccontextmanager
    async def place(self, role: str, prefer: Preference | None = None) -> AsyncIterator[Server]:
        """Give a role to the server that is preferred, and its load with it.

        `prefer` gives each candidate a number, the highest wins; of equals the one that has the role already, else the
        one with the least to do. Prefill's load ends with the block, decode's with the attempt.
        """
        server = self.run.place(role, prefer)
        try:
            yield server
        finally:
            self.run.leave(role)

    # --- calls

    async def send_prepare_receive(
        self, session: object, request: CompletionRequest, server_url: str
    ) -> tuple[str, int]:
        """prep_recv: have decode make room.

        `session` may be anything, here and below: the coordinator's own connections are used.

        Returns:
            The metadata for prefill, and how many tokens of the prompt decode has cached.

        Raises:
            coordinator.core.errors.RequestError: let it pass, and the request is tried elsewhere or refused.
        """
        del session
        answer = PrepRecvResponse.model_validate_json(await self.run.prepare(server_url, _body(request)))
        return answer.kv_append_metadata, answer.prefix_matched_length

    async def send_remote_send(self, session: object, request: CompletionRequest, server_url: str) -> None:
        """remote_send: have prefill compute a part of the prompt and send its KV; ends prefill's load."""
        del session
        await self.run.send(server_url, _body(request))

    def send_start_generate(
        self, session: object, request: CompletionRequest, server_url: str
    ) -> AsyncIterator[CompletionResponse]:
        """start_generate: the responses of decode as they come; one response where `request.stream` is false."""
        del session
        return Responses(self.run.generate(server_url, GENERATE, _body(request)))

    def send_completion(
        self, session: object, request: CompletionRequest, server_url: str
    ) -> AsyncIterator[CompletionResponse]:
        """An ordinary completion of one engine, which does it all."""
        del session
        return Responses(self.run.generate(server_url, COMPLETIONS, _body(request)))

    # --- the ordinary way

    async def _alone(self, request: CompletionRequest) -> AsyncGenerator[CompletionResponse | None, Any]:
        async for response in self.send_completion(None, request, self.decode.url):
            yield None if preempted(response) else response

    async def _over_pair(self, request: CompletionRequest) -> AsyncGenerator[CompletionResponse | None, Any]:
        given = request.model_dump()
        length = len(request.prompt)
        end = length - 1
        if self.pd_balance_factor >= LEAST_FACTOR:
            end = max(0, min(end, int((1 - self.pd_balance_factor) * length)))
        metadata, cached = await self.send_prepare_receive(None, PrepRecvRequest(**given, end=end), self.decode.url)
        if cached < end:
            ask = RemoteSendRequest(
                **given, begin=cached, end=end, kv_addr_info=metadata, recv_rank=self.decode.recv_rank or 0
            )
            await self.send_remote_send(None, ask, self.prefill.url)
        begin = StartGenerateRequest(**given, begin=end)
        async for response in self.send_start_generate(None, begin, self.decode.url):
            yield None if preempted(response) else response


class Responses:
    """The responses of one call: an async iterator that holds nothing open by itself."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> "Responses":
        return self

    async def __anext__(self) -> CompletionResponse:
        return CompletionResponse.model_validate_json(await anext(self._chunks))


def preempted(response: CompletionResponse) -> bool:
    """Whether decode has given the request back."""
    return bool(response.choices) and response.choices[0].finish_reason == "preempt"


def _body(request: CompletionRequest) -> bytes:
    return request.model_dump_json().encode()


__all__ = ["DECODE", "PREFILL", "Router", "preempted"]
