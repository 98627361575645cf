"""Triton (KServe v2 and its generate extension): the model stands in the path, token ids travel in UINT32 tensors."""

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote

import msgspec
from msgspec import Raw

from coordinator.core.errors import BadRequest, RequestError
from coordinator.core.ports import Route
from coordinator.core.request import Ask, Headers

from . import bodies, values
from .bodies import ABSENT, Body
from .family import Family

_MODELS: Final = "/v2/models/"
_BINARY_HEADER: Final = b"inference-header-content-length"
_MODEL_ROUTES: Final = (
    ("POST", "/generate", "infer"),
    ("POST", "/generate_stream", "infer"),
    ("POST", "/infer", "infer"),
    ("GET", "", "model"),
    ("GET", "/config", "config"),
    ("GET", "/ready", "ready"),
)


class _Body(msgspec.Struct, frozen=True, gc=False):
    text_input: Raw = ABSENT
    inputs: Raw = ABSENT
    parameters: Raw = ABSENT
    max_new_tokens: Raw = ABSENT
    max_tokens: Raw = ABSENT


class _Tensor(msgspec.Struct, frozen=True, gc=False):
    data: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_Body)
_TENSORS: Final = msgspec.json.Decoder(list[_Tensor])


class Triton(Family):
    """Text by `generate` and `generate_stream`, token ids by `infer`; only the path tells whether it is a stream."""

    name = "triton"
    routes: Sequence[Route] = (
        Route("GET", "/v2", "server"),
        Route("GET", "/v2/health/live", "live"),
        Route("GET", "/v2/health/ready", "ready"),
        *(
            Route(method, f"/v2/models/{{model}}{version}{end}", operation)
            for version in ("", "/versions/{version}")
            for method, end, operation in _MODEL_ROUTES
        ),
    )
    prefixes = ("/v2/",)

    def check_headers(self, headers: Headers) -> None:
        """Refuse tensors that follow the JSON as raw bytes, as tritonclient sends numpy input by default."""
        if any(name == _BINARY_HEADER for name, _ in headers):
            raise BadRequest("binary tensor data is not supported, send JSON")

    def parse(self, path: str, body: Body) -> Ask:
        """Read a generate or infer request; tensors other than token ids are the engine's to judge."""
        given = bodies.read(_BODY, body)
        model, operation = _split(path)
        if operation == "infer":
            prompt = values.prompt(given.inputs, "inputs")
            if not bodies.is_array(prompt):
                raise BadRequest("`inputs` must be a list of tensors")
            tensors = bodies.peek(_TENSORS, prompt)
            prompt_tokens = bodies.tokens(tensors[0].data, body) if tensors else None
        else:
            prompt = values.prompt(given.text_input, "text_input")
            prompt_tokens = None
        return Ask(
            stream=operation == "generate_stream",
            model=model,
            prompt_bytes=len(prompt),
            prompt_tokens=prompt_tokens,
            max_tokens=bodies.parameter_limit(given.parameters, given.max_new_tokens, given.max_tokens),
        )

    def engine_path(self, path: str) -> str:
        """The path without `/versions/V`, which engines do not know (MindIE §2)."""
        parts = super().engine_path(path).split("/")
        if parts[4:5] == ["versions"]:
            del parts[4:6]
        return "/".join(parts)

    def renamed(self, path: str, body: Body, model: str) -> tuple[str, Body]:
        """The path with another model name; the body names none."""
        parts = path.split("/")
        parts[3] = quote(model, safe="")
        return "/".join(parts), body

    def error_event(self, error: RequestError) -> bytes:
        """The same after `data:`, without the space that the family's engines leave out (MindIE §5.3)."""
        return b"data:" + self.error_body(error) + b"\n\n"


def _split(path: str) -> tuple[str, str]:
    """Model and operation of a path below `/v2/models/`."""
    model, _, rest = path.removeprefix(_MODELS).rstrip("/").partition("/")
    return unquote(model), rest.rpartition("/")[2]


def server_body(version: str) -> bytes:
    """The answer of `GET /v2`; the extensions are those served."""
    return bodies.dump({"name": "pd-coordinator", "version": version, "extensions": ["generate"]})


def model_body(name: str) -> bytes:
    """The answer of `GET /v2/models/{m}`: the tensors of `infer`."""
    tensor = {"datatype": "UINT32", "shape": [1, -1]}
    answer = {"name": name, "versions": ["1"], "platform": "pd-coordinator"}
    return bodies.dump(answer | {"inputs": [{"name": "input0"} | tensor], "outputs": [{"name": "output0"} | tensor]})


def model_config_body(name: str) -> bytes:
    """The answer of `GET /v2/models/{m}/config`: the same tensors in the words of a Triton model configuration."""
    tensor = {"data_type": "TYPE_UINT32", "dims": [1, -1]}
    answer = {
        "name": name,
        "platform": "pd-coordinator",
        "backend": "pd-coordinator",
        "max_batch_size": 0,
        "input": [{"name": "input0"} | tensor],
        "output": [{"name": "output0"} | tensor],
        "model_transaction_policy": {"decoupled": False},
    }
    return bodies.dump(answer)


def live_body() -> bytes:
    """The answer of `GET /v2/health/live`."""
    return bodies.dump({"live": True})


def ready_body(*, ready: bool) -> bytes:
    """The answer of `GET /v2/health/ready` and of a model's `/ready`; clients look at the status alone."""
    return bodies.dump({"ready": ready})
