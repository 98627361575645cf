import pytest

from coordinator.api.families import FAMILIES
from coordinator.api.family import Family
from coordinator.api.routes import RouteTable, choose
from coordinator.core.errors import UnknownPath, WrongMethod
from coordinator.core.ports import Route

TABLE = RouteTable(FAMILIES)


def found(method, path):
    match = TABLE.match(method, path)
    return [family.name for family in match.families], match.operation, dict(match.params)


@pytest.mark.parametrize(
    ("method", "path", "families", "operation", "params"),
    [
        ("POST", "/v1/chat/completions", ["openai"], "infer", {}),
        ("POST", "/v1/completions", ["openai", "disaggpb"], "infer", {}),
        ("GET", "/v1/models", ["openai"], "models", {}),
        ("GET", "/v1/models/m", ["openai"], "model", {"model": "m"}),
        ("GET", "/v1/models/org/m", ["openai"], "model", {"model": "org/m"}),
        ("GET", "/v1/models/org%2Fm%252F", ["openai"], "model", {"model": "org/m%2F"}),
        ("POST", "/", ["tgi", "disaggpb"], "infer", {}),
        ("POST", "/generate", ["tgi", "vllm", "sglang", "disaggpb"], "infer", {}),
        ("POST", "/generate_stream", ["tgi"], "infer", {}),
        ("GET", "/info", ["tgi"], "info", {}),
        ("GET", "/health", ["tgi"], "ready", {}),
        ("GET", "/v2", ["triton"], "server", {}),
        ("GET", "/v2/health/live", ["triton"], "live", {}),
        ("GET", "/v2/health/ready", ["triton"], "ready", {}),
        ("GET", "/v2/models/m", ["triton"], "model", {"model": "m"}),
        ("GET", "/v2/models/m/config", ["triton"], "config", {"model": "m"}),
        ("GET", "/v2/models/m/ready", ["triton"], "ready", {"model": "m"}),
        ("GET", "/v2/models/org%2Fm/versions/1", ["triton"], "model", {"model": "org/m", "version": "1"}),
        ("GET", "/v2/models/m/versions/1/config", ["triton"], "config", {"model": "m", "version": "1"}),
        ("GET", "/v2/models/m/versions/1/ready", ["triton"], "ready", {"model": "m", "version": "1"}),
        ("POST", "/v2/models/m/generate", ["triton"], "infer", {"model": "m"}),
        ("POST", "/v2/models/m/generate_stream", ["triton"], "infer", {"model": "m"}),
        ("POST", "/v2/models/m/infer", ["triton"], "infer", {"model": "m"}),
        ("POST", "/v2/models/versions/infer", ["triton"], "infer", {"model": "versions"}),
        ("POST", "/v2/models/m/versions/1/infer", ["triton"], "infer", {"model": "m", "version": "1"}),
        ("POST", "/infer", ["mindie"], "infer", {}),
        ("POST", "/infer_token", ["mindie"], "infer", {}),
        ("POST", "/v1/tokenizer", ["mindie"], "tokenize", {}),
    ],
)
def test_the_contracts_paths(method, path, families, operation, params):
    assert found(method, path) == (families, operation, params)
    if path != "/":
        assert found(method, path + "/") == (families, operation, params)
    if method == "GET":
        assert found("HEAD", path) == (families, operation, params)


@pytest.mark.parametrize(
    "path",
    [
        "", "x", "*", "//", "/x", "/metrics", "/tokenize", "/generate/x", "/v1", "/v1/", "/v1/chat", "/v1/models//",
        "/v1/completions/x", "/v1/chat/completions//", "/v1/tokenizer/x", "/v2/", "/v2/models", "/v2/models/",
        "/v2/models//generate", "/v2/models/m/", "/v2/models/m/x", "/v2/models/m/stopInfer", "/v2/models/m/versions",
        "/v2/models/m/versions//infer", "/v2/models/m/infer/x", "/v2/models/m/versions/1/x", "/v2/health",
        "xv2/models/m/infer", "/V1/models", "/v2/models/org/m/infer", "v2/models/m", "/infer%5Ftoken",
    ],
)  # fmt: skip
def test_other_paths_are_unknown(path):
    if path in ("/v2/", "/v2/models/m/"):  # a slash at the end is ignored
        assert TABLE.match("GET", path)
        return
    for method in ("GET", "POST"):
        with pytest.raises(UnknownPath) as caught:
            TABLE.match(method, path)
        assert caught.value.status == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/generate", "POST"),
        ("get", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/m", "GET, HEAD"),
        ("DELETE", "/v2/models/m", "GET, HEAD"),
        ("OPTIONS", "/v2/models/m/infer", "POST"),
        ("PUT", "/", "POST"),
    ],
)
def test_wrong_methods_name_the_right_ones(method, path, allow):
    with pytest.raises(WrongMethod) as caught:
        TABLE.match(method, path)
    assert caught.value.allow == allow
    assert allow in caught.value.message
    assert path not in caught.value.message or path == "/"


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/", "tgi"), ("/generate", "tgi"), ("/generate/x", "tgi"), ("/generate_stream", "tgi"), ("/info", "tgi"),
        ("/health", "tgi"), ("/v1/chat/completions", "openai"), ("/v1/nothing", "openai"), ("/v1/models/m", "openai"),
        ("/v1/tokenizer", "mindie"), ("/v1/tokenizer/", "mindie"), ("/infer", "mindie"), ("/infer_x", "mindie"),
        ("/v2", "triton"), ("/v2/", "triton"), ("/v2/nothing", "triton"), ("/v2/models/m/infer", "triton"),
        ("/v2/repository/index", "triton"), ("/metrics", "openai"), ("/tokenize", "openai"), ("", "openai"),
        ("*", "openai"), ("/v20", "openai"),
    ],
)  # fmt: skip
def test_every_path_has_an_error_shape(path, family):
    assert TABLE.family_of(path).name == family


@pytest.mark.parametrize(
    ("body", "family"),
    [
        (b'{"inputs":"a"}', "tgi"),
        (b'{"prompt":"a"}', "vllm"),
        (b'{"prompt":"a","inputs":"b"}', "tgi"),
        (b'{"prompt":"a","inputs":null}', "vllm"),
        (b'{"prompt":"say \\"inputs\\" twice: \\"inputs"}', "vllm"),
        (b'{"prompt":"a","x":{"inputs":1}}', "vllm"),
        (b'{"prompt":"a","stream":"yes"}', "vllm"),
        (b'{"token_ids":[1]}', "disaggpb"),
        (b'{"token_ids":[]}', "disaggpb"),
        (b'{"token_ids":[1],"prompt":"a"}', "vllm"),
        (b'{"token_ids":[1],"inputs":"a"}', "tgi"),
        (b'{"token_ids":[1],"text":"a"}', "sglang"),
        (b"{}", "tgi"),
        (b'{"inputs":null,"prompt":null}', "tgi"),
        (b'{"prompt":"a"', "tgi"),
        (b"\xff", "tgi"),
    ],
)
def test_the_body_chooses_between_families(body, family):
    match = TABLE.match("POST", "/generate")
    assert choose(match, "/generate", body).name == family


@pytest.mark.parametrize(
    ("path", "body", "family"),
    [
        ("/v1/completions", b'{"prompt":"a"}', "openai"),
        ("/v1/completions", b'{"messages":[]}', "openai"),
        ("/v1/completions", b'{"prompt":"a","token_ids":[1]}', "openai"),
        ("/v1/completions", b'{"token_ids":[1]}', "disaggpb"),
        ("/v1/completions", b'{"token_ids":"a","prompt":null}', "disaggpb"),
        ("/v1/completions", b"{}", "openai"),
        ("/v1/completions", b"nonsense", "openai"),
        ("/", b'{"inputs":"a"}', "tgi"),
        ("/", b'{"inputs":"a","token_ids":[1]}', "tgi"),
        ("/", b'{"token_ids":[1]}', "disaggpb"),
        ("/", b"nonsense", "tgi"),
    ],
)
def test_ids_without_another_prompt_are_disaggpbs(path, body, family):
    assert choose(TABLE.match("POST", path), path, body).name == family


def test_a_path_of_one_family_is_not_put_to_the_vote():
    match = TABLE.match("POST", "/v1/chat/completions")
    assert choose(match, "/v1/chat/completions", b"nonsense").name == "openai"


def test_parameters_are_a_requests_own():
    one, other = TABLE.match("GET", "/v2/models/a"), TABLE.match("GET", "/v2/models/b")
    assert (one.params["model"], other.params["model"]) == ("a", "b")


def test_families_that_disagree_stop_the_start():
    class Odd(Family):
        name = "odd"
        routes = (Route("POST", "/generate", "tokenize"),)

        def parse(self, path, body):
            raise AssertionError

    with pytest.raises(ValueError, match="POST /generate is infer and tokenize"):
        RouteTable((*FAMILIES, Odd()))
