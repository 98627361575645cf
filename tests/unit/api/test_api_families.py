"""What is particular to one family; what all share is in the conformance kit."""

import json
import subprocess
import sys

import pytest

from coordinator.api import openai, tgi, triton
from coordinator.api.families import FAMILIES
from coordinator.core.errors import BadRequest, EngineRefused, RequestError

BY_NAME = {family.name: family for family in FAMILIES}


def failed(status):
    error = RequestError("told")
    error.status = status
    return error


def test_names_are_unique():
    assert len(BY_NAME) == len(FAMILIES)


def test_families_reach_no_io():
    code = (
        "import sys, coordinator.api.routes, coordinator.api.families as f;"
        "print([m for m in ('asyncio', 'aiohttp', 'uvloop', 'socket', 'ssl', 'selectors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "invalid_request_error"), (413, "invalid_request_error"), (422, "invalid_request_error"),
        (429, "rate_limit_error"), (500, "server_error"), (502, "server_error"), (503, "server_error"),
        (504, "server_error"),
    ],
)  # fmt: skip
def test_openai_error_types(status, kind):
    assert json.loads(BY_NAME["openai"].error_body(failed(status)))["error"]["type"] == kind


@pytest.mark.parametrize(
    ("status", "kind", "late"),
    [
        (400, "validation", "validation"), (404, "validation", "validation"), (422, "validation", "validation"),
        (429, "overloaded", "overloaded"), (500, "generation", "generation"), (502, "generation", "generation"),
        (503, "overloaded", "overloaded"), (504, "generation", "incomplete_generation"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["tgi", "mindie"])
def test_tgi_error_types(name, status, kind, late):
    family, error = BY_NAME[name], failed(status)
    assert json.loads(family.error_body(error)) == {"error": "told", "error_type": kind}
    assert json.loads(family.error_event(error).removeprefix(b"data: ")) == {"error": "told", "error_type": late}


def test_an_engines_message_is_passed_on():
    for family in FAMILIES:
        assert "n must be 1 in dmi mode" in family.error_body(EngineRefused(422, "n must be 1 in dmi mode")).decode()


def test_binary_tensors_are_refused_clearly():
    headers = ((b"host", b"h"), (b"inference-header-content-length", b"12"))
    with pytest.raises(BadRequest, match="binary tensor data is not supported, send JSON"):
        BY_NAME["triton"].check_headers(headers)
    BY_NAME["triton"].check_headers(headers[:1])
    BY_NAME["openai"].check_headers(headers)


def test_streams_end_as_their_clients_expect():
    ends = {family.name: family.ends_with for family in FAMILIES}
    assert ends.pop("openai") == ends.pop("sglang") == b"data: [DONE]\n\n"
    assert set(ends.values()) == {b""}


def test_a_slash_at_the_end_does_not_travel_on():
    paths = {"/": "/", "/generate/": "/generate", "/v1/models/a/": "/v1/models/a"}
    for path, wanted in paths.items():
        assert BY_NAME["tgi"].engine_path(path) == wanted


def test_a_whole_token_array_of_a_batch_is_counted_once():
    body = json.dumps({"prompt": [list(range(1000)), [7]]}).encode()
    ask = BY_NAME["openai"].parse("/v1/completions", body)
    assert ask.prompt_tokens == 1001
    assert ask.prompt_bytes == len(body) - len('{"prompt": }')


def test_openai_models():
    listed = json.loads(openai.models_body(["m", "tgi"], 1760000000))
    assert listed["object"] == "list"
    assert [(m["id"], m["object"], m["created"]) for m in listed["data"]] == [
        ("m", "model", 1760000000),
        ("tgi", "model", 1760000000),
    ]
    assert json.loads(openai.model_body("m", 1760000000)) == listed["data"][0]
    assert json.loads(openai.models_body([], 0)) == {"object": "list", "data": []}


def test_tgi_info_and_health():
    assert json.loads(tgi.info_body("m", "1.2"))["model_id"] == "m"
    assert json.loads(tgi.info_body(None, "1.2")) == {
        "model_id": "", "model_sha": None, "router": "pd-coordinator", "version": "1.2",
    }  # fmt: skip
    assert json.loads(tgi.health_body(ready=True)) != json.loads(tgi.health_body(ready=False))


def test_triton_metadata_names_the_tensors_of_infer():
    server = json.loads(triton.server_body("1.2"))
    assert set(server) == {"name", "version", "extensions"}
    model, config = json.loads(triton.model_body("a/b")), json.loads(triton.model_config_body("a/b"))
    assert (model["name"], config["name"]) == ("a/b", "a/b")
    assert [(t["name"], t["datatype"]) for t in model["inputs"] + model["outputs"]] == [
        ("input0", "UINT32"),
        ("output0", "UINT32"),
    ]
    assert [t["name"] for t in config["input"] + config["output"]] == ["input0", "output0"]
    assert {t["data_type"] for t in config["input"] + config["output"]} == {"TYPE_UINT32"}
    assert all(isinstance(version, str) for version in model["versions"])
    assert json.loads(triton.live_body()) == {"live": True}
    assert [json.loads(triton.ready_body(ready=ready)) for ready in (True, False)] == [
        {"ready": True},
        {"ready": False},
    ]
