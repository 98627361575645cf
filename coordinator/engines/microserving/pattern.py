"""Engines that are orchestration patterns: a router of the user's own makes the calls (docs/patterns.md)."""

import inspect
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ValidationError

from coordinator.core.errors import BadRequest, InternalError, RequestError
from coordinator.core.out import Out
from coordinator.core.ports import Outcome, Placement
from coordinator.core.request import Request
from coordinator.engines.context import EngineContext
from coordinator.engines.microserving.ends import end_here, with_length
from coordinator.engines.microserving.engine import MicroservingEngine, pause
from coordinator.engines.microserving.output import Output
from coordinator.engines.microserving.pattern_run import PatternRun, Surroundings
from coordinator.engines.microserving.settings import ROUND_ROBIN
from coordinator.engines.microserving.task import Task, body_fields, make_task, progress_of
from coordinator.sdk.loading import place_of
from coordinator.sdk.openai_api_protocol import CompletionRequest, CompletionResponse, DebugConfig
from coordinator.sdk.router import Router
from coordinator.wire.json_edit import write_fields

Responses = AsyncGenerator[CompletionResponse | None, Any]


class PatternEngine(MicroservingEngine):
    """Serves requests with a router class; everything that is not the calls themselves is MicroservingEngine's.

    Attributes:
        router: the class; `pattern_of` makes a subclass that has one.
    """

    router: ClassVar[type[Router]] = Router

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        alone = self._settings.mode == ROUND_ROBIN
        self._around = Surroundings(self._means, {}, alone=alone)

    def renew(self, settings: Mapping[str, object]) -> None:
        """Run patterns that begin from here on by these settings."""
        super().renew(settings)
        self._around = replace(self._around, means=self._means, alone=self._settings.mode == ROUND_ROBIN)

    async def serve(self, request: Request, placement: Placement, out: Out) -> Outcome:
        """Run one attempt of the pattern.

        Raises:
            RequestError: of a call that the pattern let pass; InternalError for any other exception of the pattern.

        Cancelled, the pattern is cancelled where it waits; its streams are closed and its reservations freed.
        """
        fields = body_fields(request)
        progress = progress_of(request, fields, uuid.uuid4().hex)
        await pause(progress.preempts)
        tokenizer = self._tokenizer(placement.decode)
        task = await make_task(request, fields, progress, tokenizer, count=self.router.tokenize_prompts)
        if task.spent:
            return end_here(task, out)
        if task.prompt_tokens is not None:
            task = with_length(task, task.prompt_tokens)
        run = PatternRun(self._around, request, placement, tokenizer)
        asked = self._asked(task, run.wire_id)
        out.paced_by(run.pause, run.resume)
        output = Output(self._means, task, placement, out)
        try:
            return await self._translate(run, asked, output)
        except RequestError as error:
            guilty = run.guilty(error)
            if guilty is error:
                raise
            raise guilty from error
        except Exception as error:
            self._context.log.error("request %s: pattern %s failed: %s", request.id, self._name, self._place(error))
            raise InternalError(f"pattern {self._name}: {type(error).__name__}") from error
        finally:
            run.finish()

    async def _translate(self, run: PatternRun, asked: CompletionRequest, output: Output) -> Outcome:
        router = self.router()
        router.run = run
        responses = router.translate_request(asked, run.wire_id)
        if not inspect.isasyncgen(responses):
            raise TypeError("translate_request must be an async generator: a coroutine that yields responses")
        async with aclosing(responses):
            async for response in responses:
                if response is None or output.take(response):
                    return await output.given_back()
        return output.end()

    def _asked(self, task: Task, wire_id: str) -> CompletionRequest:
        """The client's request as MLC-LLM's object; what is left of it after a preempt."""
        body = write_fields({**task.fields, **task.last})
        try:
            asked = CompletionRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise BadRequest(f"`{where}`: {first['msg']}") from None
        asked.user = wire_id
        if asked.debug_config is None:
            asked.debug_config = DebugConfig()
        return asked

    @property
    def _name(self) -> str:
        return self.router.__name__

    def _place(self, error: Exception) -> str:
        """Where in the pattern's own file an exception came up; its text may hold parts of prompts and is not told."""
        try:
            file = inspect.getfile(self.router)
        except (OSError, TypeError):
            file = ""
        return place_of(error, file)


def pattern_of(router: type[Router]) -> type[PatternEngine]:
    """The engine class of a router class.

    Raises:
        ValueError: the router cannot be made without arguments, as each attempt makes one.
    """
    try:
        router()
    except Exception as error:
        raise ValueError(
            f"the pattern {router.__name__} must be possible to make without arguments, for each attempt makes one: "
            f"{type(error).__name__}"
        ) from error
    return type(f"{router.__name__}Engine", (PatternEngine,), {"router": router, "__doc__": router.__doc__})
