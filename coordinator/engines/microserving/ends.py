"""What follows when decode gives a request back: another attempt, an end here, or an error."""

import time
from dataclasses import replace

import msgspec

from coordinator.core.errors import EngineFailed, NoInstance
from coordinator.core.instance import Instance
from coordinator.core.out import Out
from coordinator.core.ports import COMPLETED, Outcome, Resume
from coordinator.engines.http_leg import side_of
from coordinator.engines.microserving.means import Means
from coordinator.engines.microserving.progress import Progress, body_with
from coordinator.engines.microserving.task import Task
from coordinator.wire.chat_shape import last_chunk
from coordinator.wire.completion_stream import CompletionEditor
from coordinator.wire.events import wants_usage
from coordinator.wire.json_edit import text


async def given_back(
    means: Means, task: Task, decode: Instance, out: Out, editor: CompletionEditor | None = None
) -> Resume:
    """What follows a preempt: another attempt, which another decode instance gets first (§10, preempt policy).

    Args:
        means: whose bound on preempts counts.
        task: the attempt that has ended.
        decode: who has preempted it.
        out: where its answer went.
        editor: of its stream, if it had one; None: nothing of it was sent.

    Raises:
        NoInstance: it was preempted too often, or what was begun cannot go on elsewhere.
    """
    progress = msgspec.structs.replace(task.progress, preempts=task.progress.preempts + 1)
    if progress.preempts > means.settings.max_preempts:
        raise NoInstance(
            "the decode instances are out of KV cache room: the request was preempted too often",
            detail=f"preempted {progress.preempts} times, lastly by {decode.id}",
        )
    if editor is not None and out.started:
        if not task.goes_on:
            raise NoInstance(
                "the decode instance is out of KV cache room, and what it had begun cannot go on elsewhere",
                detail=f"preempted by {decode.id}",
            )
        progress = await _with_output(progress, task, editor, decode)
    return Resume(body_with(task.given, progress), progress.client_id, avoid=decode.id)


async def _with_output(progress: Progress, task: Task, editor: CompletionEditor, decode: Instance) -> Progress:
    try:
        said = editor.text
    except msgspec.MsgspecError as error:
        raise EngineFailed(side_of(decode), decode.id, "bad_reply", detail="its text cannot be read") from error
    words = progress.text + said
    tokens = await _counted(progress, task, editor, words) if said else progress.tokens
    return msgspec.structs.replace(progress, text=words, tokens=tokens, started=True)


async def _counted(progress: Progress, task: Task, editor: CompletionEditor, words: str) -> int | None:
    """How many tokens all that was generated is; None: nobody knows before the next prep_recv tells."""
    if editor.tokens:
        return None if progress.tokens is None else progress.tokens + editor.tokens
    if task.tokenizer is not None:
        return len(await task.tokenizer.encode(words, special=False))
    return None


def with_length(task: Task, tokens: int) -> Task:
    """The task of which it is known how long its prompt is, by decode's answer to prep_recv."""
    progress = task.progress
    if not progress.started:
        return replace(task, progress=msgspec.structs.replace(progress, prompt_tokens=tokens))
    if progress.tokens is None and progress.prompt_tokens is not None:
        # what was generated is part of this prompt
        generated = max(0, tokens - progress.prompt_tokens)
        return replace(task, progress=msgspec.structs.replace(progress, tokens=generated))
    return task


def end_here(task: Task, out: Out) -> Outcome:
    """End a stream of which nothing is left to generate: the engine was preempted after the last token."""
    progress = task.progress
    counts = None
    if wants_usage(task.last.get("stream_options")) and progress.prompt_tokens is not None:
        counts = (progress.prompt_tokens, progress.tokens or 0)
    tail = last_chunk(
        progress.client_id,
        text(task.given.get("model")),
        suffix=text(task.last.get("suffix")) or "",
        counts=counts,
        chat=task.chat,
        created_s=int(time.time()),
    )
    out.finish(tail, time.monotonic(), token=False)
    return COMPLETED
