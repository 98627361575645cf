"""Requests for engines that take token ids: what is asked for, and the prompt as ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.api.generation import Generation, generation_of
from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.tokens import Tokenizer

NEEDS_TOKENIZER: Final = (
    "this model has no tokenizer here, so the prompt must be a list of token ids; "
    "for text and chats the operator can set `cluster.tokenizer`"
)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt.

    Attributes:
        ids: at least one.
        text: as far as somebody wants it: of a text prompt, and of any prompt that the answer begins with.
    """

    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request as engines need it that take token ids.

    Attributes:
        tokenizer: None: ids travel both ways.
    """

    generation: Generation
    prompt: TokenPrompt
    tokenizer: Tokenizer | None


async def read_token_request(request: Request, tokenizer: Tokenizer | None) -> TokenRequest:
    """Read a request and make token ids of its prompt; long ones are worked on in a thread.

    Raises:
        BadRequest: a field is wrong, the prompt is empty, or it is text and there is no tokenizer.
        DeadlineExceeded: the tokenizer's threads have too much to do.
    """
    generation = generation_of(request)
    if tokenizer is None:
        generation = replace(generation, return_ids=True)
    return TokenRequest(generation, await prompt_of(generation, tokenizer), tokenizer)


async def prompt_of(generation: Generation, tokenizer: Tokenizer | None) -> TokenPrompt:
    """The prompt of one request as token ids; raises as `read_token_request`."""
    prompt = generation.prompt
    if isinstance(prompt, tuple):
        return await _of_ids(prompt, generation, tokenizer)
    if tokenizer is None:
        raise BadRequest(NEEDS_TOKENIZER)
    text = prompt if prompt is not None else await _chat(generation, generation.messages or (), tokenizer)
    ids = await tokenizer.encode(text, special=generation.add_special_tokens)
    if not ids:
        raise BadRequest("the prompt is empty")
    return TokenPrompt(tuple(ids), text)


async def _of_ids(ids: tuple[int, ...], generation: Generation, tokenizer: Tokenizer | None) -> TokenPrompt:
    if tokenizer is None:
        return TokenPrompt(ids)
    if max(ids) > tokenizer.highest_id:
        raise BadRequest(f"the prompt has a token id above {tokenizer.highest_id}, the model's highest")
    text = ""
    if generation.echo:
        text = await tokenizer.text(ids, skip_special=generation.skip_special_tokens)
    return TokenPrompt(ids, text)


async def _chat(generation: Generation, messages: Sequence[Mapping[str, object]], tokenizer: Tokenizer) -> str:
    return await tokenizer.chat(
        messages,
        tools=generation.tools,
        add_generation_prompt=generation.add_generation_prompt,
        extra=generation.chat_template_kwargs,
    )
