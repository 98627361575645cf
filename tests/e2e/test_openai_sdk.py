"""The official OpenAI client, as people use it."""

import openai
import pytest
from dialects import MODEL
from openai import OpenAI
from processes import until

MESSAGES = [{"role": "user", "content": "Tell me about the mountains"}]


def client_of(coordinator, **more) -> OpenAI:
    return OpenAI(base_url=f"{coordinator.url}/v1", api_key="unused", max_retries=0, timeout=30, **more)


def says(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me about the mountains {words}"}]


@pytest.fixture
def client(cluster):
    with client_of(cluster.coordinator) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=9)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 9
    assert answer._request_id


def test_chat_stream_equals_the_whole_answer(client):
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, stream=True, stream_options=options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks if chunk.usage][-1].completion_tokens == whole.usage.completion_tokens


def test_stream_helper(client):
    with client.chat.completions.stream(model=MODEL, messages=says("[[length:6]]"), max_tokens=50) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") >= 5
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["Once upon a time", [17, 18, 19]])
def test_completions(client, prompt):
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8)
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage.completion_tokens == 8


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as failure:
        client.models.retrieve("nobody")
    assert failure.value.code == "model_not_found"


def test_a_query_string_on_every_call(cluster):
    with client_of(cluster.coordinator, default_query={"api-version": "2026-01-01"}) as client:
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4).choices
        assert client.models.retrieve(MODEL).id == MODEL
        assert list(client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, stream=True))


def test_request_ids(client):
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, extra_headers={"X-Request-Id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse()._request_id == "my-own-id"
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, stream=True, extra_headers={"X-Request-Id": "another"}
    ) as streamed:
        assert streamed.headers["x-request-id"] == "another"
        assert list(streamed.iter_lines())[-2] == "data: [DONE]"


def test_bad_requests(client):
    with pytest.raises(openai.BadRequestError) as failure:
        client.post("/chat/completions", body={"model": MODEL}, cast_to=object)
    error = failure.value
    assert (error.status_code, error.code, error.type) == (400, "invalid_request", "invalid_request_error")
    assert "messages" in error.message
    assert error.request_id


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as failure:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert failure.value.code == "model_not_found"
    assert "nobody" in failure.value.message


def test_an_engine_that_is_overloaded(client):
    with pytest.raises(openai.RateLimitError) as failure:
        client.chat.completions.create(model=MODEL, messages=says("[[fault:status=429]]"))
    assert failure.value.type == "rate_limit_error"


def test_an_engine_that_refuses(client):
    with pytest.raises(openai.UnprocessableEntityError) as failure:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=3)
    assert "temperature" in failure.value.message


def test_no_instances(lonely):
    with client_of(lonely) as client, pytest.raises(openai.InternalServerError) as failure:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert (failure.value.status_code, failure.value.code) == (503, "no_instance")
    assert int(failure.value.response.headers["retry-after"]) <= 120


def test_retries_end_in_an_answer(cluster):
    """The client obeys Retry-After, so one failure of the engines costs it a second and not the answer."""
    cluster.prefill.fault("#1:status=429")
    cluster.of("prefill")[1].fault("#1:status=429")
    with client_of(cluster.coordinator).with_options(max_retries=2) as client:
        assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4).choices


@pytest.mark.parametrize("fault", ["decode_error@4", "dresult_reset@4"])
def test_an_answer_that_breaks_off_raises(client, cluster, fault: str):
    stream = client.chat.completions.create(
        model=MODEL, messages=says(f"[[fault:{fault}]] [[length:30]]"), max_tokens=30, stream=True
    )
    seen = []
    with pytest.raises(openai.APIError) as failure:
        seen.extend(stream)
    assert len(seen) >= 3
    assert "decode instance failed" in failure.value.message
    until(lambda: set(cluster.coordinator.states().values()) == {"ready"}, "all instances are back")


def test_leaving_a_stream(client, cluster):
    stream = client.chat.completions.create(model=MODEL, messages=says("[[fault:stall@5]]"), max_tokens=30, stream=True)
    assert next(iter(stream)).choices
    assert cluster.coordinator.loads()["requests_in_flight"] == 1
    stream.close()
    cluster.wait_idle()
