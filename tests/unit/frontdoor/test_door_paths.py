"""Every path of the data plane: who serves it, with which method, and in whose shape errors come."""

import json

import pytest
from door_world import World

from coordinator.core.errors import BodyTooLarge, HeadersTooLarge, UnknownExpectation, UnsupportedEncoding

CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
TGI = b'{"inputs":"x"}'
VLLM = b'{"prompt":"x"}'
TEXT = b'{"text_input":"x"}'
TENSOR = b'{"inputs":[{"name":"input0","shape":[1,2],"datatype":"UINT32","data":[1,2]}]}'
IDS = b'{"input_id":[1,2]}'

INFER = [
    ("/v1/chat/completions", CHAT, "openai"),
    ("/v1/completions", b'{"model":"m","prompt":"x"}', "openai"),
    ("/", TGI, "tgi"),
    ("/generate", TGI, "tgi"),
    ("/generate_stream", TGI, "tgi"),
    ("/generate", VLLM, "vllm"),
    ("/v2/models/m/generate", TEXT, "triton"),
    ("/v2/models/m/generate_stream", TEXT, "triton"),
    ("/v2/models/m/infer", TENSOR, "triton"),
    ("/v2/models/m/versions/1/generate", TEXT, "triton"),
    ("/v2/models/m/versions/1/generate_stream", TEXT, "triton"),
    ("/v2/models/m/versions/1/infer", TENSOR, "triton"),
    ("/infer", TGI, "mindie"),
    ("/infer_token", IDS, "mindie"),
]
OURS = [
    ("/v1/models", "openai", "data"), ("/v1/models/m", "openai", "id"), ("/info", "tgi", "model_id"),
    ("/health", "tgi", "status"), ("/v2", "triton", "name"), ("/v2/models/m", "triton", "inputs"),
    ("/v2/models/m/versions/1", "triton", "inputs"), ("/v2/models/m/config", "triton", "input"),
    ("/v2/models/m/versions/1/config", "triton", "input"), ("/v2/models/m/ready", "triton", "ready"),
    ("/v2/models/m/versions/1/ready", "triton", "ready"), ("/v2/health/live", "triton", "live"),
    ("/v2/health/ready", "triton", "ready"),
]  # fmt: skip
ALL_PATHS = sorted({(path, family) for path, _, family in INFER if family != "vllm"} | {(p, f) for p, f, _ in OURS})
UNSERVED = [("/v1/embeddings", "openai"), ("/nope", "openai"), ("/v2/models/m/stopInfer", "triton"),
            ("/v2/nope", "triton"), ("/generate_more", "tgi"), ("/infer_more", "mindie"), ("/flush_cache", "openai"),
            ("/dresult", "openai"), ("*", "openai")]  # fmt: skip


def in_shape_of(family, answer, status):
    """The error text of an answer, whose shape and headers are looked at."""
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert "x-request-id" in answer.headers
    error = json.loads(answer.body)
    match family:
        case "openai":
            assert set(error) == {"error"}
            assert set(error["error"]) == {"message", "type", "param", "code"}
            return error["error"]["message"]
        case "tgi" | "mindie":
            assert set(error) == {"error", "error_type"}
            assert error["error_type"] in ("overloaded", "validation", "generation", "incomplete_generation")
        case _:
            assert set(error) == {"error"}
    assert isinstance(error["error"], str)
    return error["error"]


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize(("path", "body", "family"), INFER)
class TestInference:
    async def test_it_goes_to_the_dispatcher(self, world, path, body, family):
        answer = await world.ask(path, body)
        assert (answer.status, answer.body) == (200, b'{"ok":1}')
        request = world.dispatcher.requests[0]
        assert (request.api, request.body) == (family, body)
        assert request.path == path.replace("/versions/1", "")
        assert world.counted() == {(family, "ok"): 1}

    @pytest.mark.parametrize("more", ["?a=1", "/", "/?x=/v1/models&y", "?"])
    async def test_a_query_or_a_slash_at_the_end_changes_nothing(self, world, path, body, family, more):
        target = path + more if path != "/" else path + more.lstrip("/")
        await world.ask(target, body)
        request = world.dispatcher.requests[0]
        assert request.api == family
        assert request.path == path.replace("/versions/1", "")
        assert request.query == target.partition("?")[2]

    @pytest.mark.parametrize("header", ["Content-Type: text/plain", "Content-Type: application/x-www-form-urlencoded"])
    async def test_nor_does_an_odd_content_type(self, world, path, body, family, header):
        assert (await world.ask(path, body, headers=[header])).status == 200
        assert world.dispatcher.requests[0].api == family

    @pytest.mark.parametrize("bad", [b"", b"[]", b"null", b"{bad", b"\xff\xfe\x00", b"[" * 10_000, b"7"])
    async def test_a_body_that_cannot_be_read(self, world, path, body, family, bad):
        answer = await world.ask(path, bad, method="POST")
        # which of two families on one path it should have been cannot be told
        shown = "tgi" if family == "vllm" else family
        assert in_shape_of(shown, answer, 400)
        assert world.dispatcher.requests == []
        assert world.counted() == {(shown, "client_error"): 1}


@pytest.mark.parametrize(("path", "family", "key"), OURS)
class TestOwnAnswers:
    async def test_they_are_json(self, world, path, family, key):
        answer = await world.ask(path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert key in json.loads(answer.body)
        assert world.dispatcher.requests == world.dispatcher.calls == []

    async def test_they_are_no_requests_for_an_engine(self, world, path, family, key):
        await world.ask(path)
        assert world.counted() == {}
        assert world.lines.records == []

    async def test_head(self, world, path, family, key):
        answer = await world.ask(path, method="HEAD")
        assert answer.status == 200
        assert b"".join(answer.writes).endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("path", "family"), ALL_PATHS)
@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_wrong_methods(world, path, family, method):
    answer = await world.ask(path, method=method)
    in_shape_of(family, answer, 405)
    allowed = {m for p, m in [(p, "POST") for p, *_ in INFER] + [(p, m) for p, *_ in OURS for m in ("GET", "HEAD")]
               if p == path}  # fmt: skip
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert world.counted() == {}
    assert world.metrics.unrouted.labels("method_not_allowed").value == 1
    assert world.dispatcher.requests == []


@pytest.mark.parametrize(("path", "family"), UNSERVED)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_unknown_paths(world, path, family, method):
    if path == "*":
        method = "OPTIONS"
    answer = await world.ask(path, CHAT if method == "POST" else b"", method=method)
    in_shape_of(family, answer, 404)
    assert world.counted() == {}
    assert world.lines.records == []
    assert world.metrics.unrouted.labels("unknown_path").value == 1
    assert world.dispatcher.requests == []


@pytest.mark.parametrize(("path", "family"), [*ALL_PATHS, ("/nope", "openai")])
@pytest.mark.parametrize(
    ("refusal", "status"),
    [(BodyTooLarge("too large"), 413), (UnsupportedEncoding("no br"), 415), (UnknownExpectation("bogus"), 417),
     (HeadersTooLarge("too large"), 431)],
)  # fmt: skip
async def test_what_the_server_refuses_is_told_in_the_familys_shape(world, path, family, refusal, status):
    answer = await world.ask(path, b"{}", refusal=refusal)
    assert in_shape_of(family, answer, status) == refusal.message
    assert world.dispatcher.requests == []


@pytest.mark.parametrize(("path", "ready"), [("/health", 200), ("/v2/health/ready", 200), ("/v2/models/m/ready", 200)])
async def test_readiness_follows_the_cluster(world, path, ready):
    assert (await world.ask(path)).status == ready
    world.ready = False
    answer = await world.ask(path)
    assert answer.status == 503
    json.loads(answer.body)


async def test_alive_is_alive_whatever_the_cluster_does(world):
    world.ready = False
    for path in ("/v2/health/live", "/v1/models", "/info", "/v2"):
        assert (await world.ask(path)).status == 200


class TestModelPages:
    @pytest.mark.parametrize("path", ["/v1/models/nope", "/v2/models/nope", "/v2/models/nope/config",
                                      "/v2/models/nope/ready"])  # fmt: skip
    async def test_unknown_names(self, world, path):
        answer = await world.ask(path)
        text = in_shape_of("openai" if path.startswith("/v1") else "triton", answer, 404)
        assert "nope" in text

    @pytest.mark.parametrize(("target", "name"), [("/v1/models/dummy", "dummy"), ("/v1/models/m?x=1", "m")])
    async def test_known_names(self, world, target, name):
        assert json.loads((await world.ask(target)).body)["id"] == name

    @pytest.mark.parametrize("written", ["/v1/models/org/name", "/v1/models/org%2Fname"])
    async def test_names_with_a_slash(self, written):
        world = World(model="org/name", served=("org/name",))
        assert json.loads((await world.ask(written)).body)["id"] == "org/name"

    async def test_the_list(self):
        world = World(model=None, served=("a", "b"))
        listed = json.loads((await world.ask("/v1/models")).body)
        assert [model["id"] for model in listed["data"]] == ["a", "b"]
