"""What of a client's request these workers can do, and what has to be refused."""

from dataclasses import replace

from coordinator.api.generation import DISAGGPB, TGI, Generation
from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.engines.token_prompts import TokenRequest, read_token_request
from coordinator.tokens import Tokenizer


async def read_request(
    request: Request, tokenizer: Tokenizer | None, default_tokens: int, *, refuse: bool
) -> TokenRequest:
    """Read a request, with a limit of tokens where the client has set none.

    Args:
        request: of any API that engines with token ids can serve.
        tokenizer: of the instance; requests that are token ids both ways do without.
        default_tokens: that limit.
        refuse: whether fields that would change the answer, and that the wire has no place for, are refused.

    Raises:
        BadRequest: it cannot be read, or not be done.
    """
    asked = await read_token_request(request, None if request.api == DISAGGPB else tokenizer)
    generation = asked.generation
    if generation.n > 1 or (generation.best_of or 1) > 1:
        raise BadRequest("`n` and `best_of` must be 1: the engines of this model decode greedily")
    if refuse:
        _demand_supported(generation, logprobs=request.api != TGI)
    return replace(asked, generation=replace(generation, max_tokens=generation.max_tokens or default_tokens))


def _demand_supported(generation: Generation, *, logprobs: bool) -> None:
    """Refuse what the wire has no field for (disaggpb protocol page §1). A seed means nothing where nothing is drawn.

    `logprobs` of TGI are asked for by every stream; they are null there.
    """
    asked_for = {
        "top_p": generation.top_p not in (None, 1.0),
        "top_k": generation.top_k is not None,
        "presence_penalty": bool(generation.presence_penalty),
        "frequency_penalty": bool(generation.frequency_penalty),
        "repetition_penalty": generation.repetition_penalty not in (None, 1.0),
        "ignore_eos": generation.ignore_eos,
        "logprobs": logprobs and generation.logprobs is not None,
    }
    for name, wanted in asked_for.items():
        if wanted:
            raise BadRequest(f"`{name}` is not served by the engines of this model")
