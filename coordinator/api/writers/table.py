"""Which writer a request gets."""

from coordinator.api.generation import CHAT, DISAGGPB, OPENAI, TGI, VLLM, Generation
from coordinator.core.errors import BadRequest
from coordinator.core.request import Request
from coordinator.wire.json_edit import is_true, object_fields, request_fields

from .answer import Writer
from .chat import ChatWriter
from .completions import CompletionsWriter
from .disaggpb import DisaggpbWriter
from .tgi import TgiWriter
from .vllm import VllmWriter


def writer_of(request: Request, generation: Generation, model: str, created_s: int) -> Writer:
    """The writer of a request's answer.

    Args:
        request: for its API, path and id.
        generation: what was read from it, with `return_ids` set where there is no tokenizer.
        model: the name that the answer bears.
        created_s: Unix time in seconds.

    Raises:
        BadRequest: no answers in the shapes of this API are written here.
    """
    if request.api == OPENAI:
        kind = ChatWriter if request.path.startswith(CHAT) else CompletionsWriter
        return kind(generation, request.id, model, created_s)
    if request.api == TGI:
        return TgiWriter(generation, details=_details(request), listed=request.path == "/")
    if request.api == VLLM:
        return VllmWriter(generation)
    if request.api == DISAGGPB:
        return DisaggpbWriter()
    raise BadRequest("this API is not served by the engines of this model: use OpenAI's, TGI's or vLLM's")


def _details(request: Request) -> bool:
    try:
        parameters = object_fields(request_fields(request).get("parameters"))
    except ValueError:
        return False
    return is_true((parameters or {}).get("details"))
