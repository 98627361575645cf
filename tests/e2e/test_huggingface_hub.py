"""huggingface_hub.InferenceClient against an endpoint of one's own."""

import pytest
from dialects import MODEL
from huggingface_hub import InferenceClient
from huggingface_hub.errors import (
    GenerationError,
    HfHubHTTPError,
    OverloadedError,
    TextGenerationError,
    ValidationError,
)
from processes import until

PROMPT = "Tell me about the valley"


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    """With HF_HUB_OFFLINE set the client refuses every address, loopback too."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def client_of(coordinator, path: str = "", **more) -> InferenceClient:
    return InferenceClient(base_url=f"{coordinator.url}{path}", token="unused", timeout=30, **more)


@pytest.mark.parametrize("path", ["", "/generate"])
def test_text_generation(cluster, path: str):
    client = client_of(cluster.coordinator, path)
    text = client.text_generation(PROMPT, max_new_tokens=10)
    detailed = client.text_generation(PROMPT, max_new_tokens=10, details=True)
    assert text == detailed.generated_text != ""
    assert (detailed.details.generated_tokens, detailed.details.finish_reason) == (10, "length")


@pytest.mark.parametrize("path", ["", "/generate_stream"])
def test_text_generation_stream(cluster, path: str):
    text = client_of(cluster.coordinator).text_generation(PROMPT, max_new_tokens=10)
    client = client_of(cluster.coordinator, path)
    assert "".join(client.text_generation(PROMPT, max_new_tokens=10, stream=True)) == text
    *tokens, last = client.text_generation(PROMPT, max_new_tokens=10, stream=True, details=True)
    assert [token.generated_text for token in tokens] == [None] * len(tokens)
    assert last.generated_text == text
    assert last.details.generated_tokens == 10


@pytest.mark.parametrize("model", [None, "tgi", MODEL])
def test_chat_completion(cluster, model: str | None):
    """Without a model the client sends `dummy`."""
    client = client_of(cluster.coordinator)
    messages = [{"role": "user", "content": PROMPT}]
    whole = client.chat_completion(messages, max_tokens=9, model=model)
    assert whole.usage.completion_tokens == 9
    stream = client.chat_completion(messages, max_tokens=9, model=model, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content


def test_endpoint_info_and_health(cluster, lonely):
    client = client_of(cluster.coordinator, provider="hf-inference")
    assert client.get_endpoint_info()["model_id"] == MODEL
    assert client.health_check() is True
    assert client_of(lonely, provider="hf-inference").health_check() is False


def test_overload(cluster, lonely):
    with pytest.raises(OverloadedError):
        client_of(cluster.coordinator).text_generation(f"{PROMPT} [[fault:status=429]]")
    with pytest.raises(OverloadedError):
        client_of(lonely).text_generation(PROMPT)


def test_validation(cluster):
    client = client_of(cluster.coordinator)
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation(PROMPT, temperature=3.0)
    with pytest.raises(ValidationError, match="temperature"):
        list(client.text_generation(PROMPT, temperature=3.0, stream=True))
    with pytest.raises(HfHubHTTPError, match="nobody"):
        client.chat_completion([{"role": "user", "content": PROMPT}], model="nobody")


@pytest.mark.parametrize("fault", ["decode_error@3", "dresult_end@3"])
def test_an_answer_that_breaks_off_raises(cluster, fault: str):
    client = client_of(cluster.coordinator)
    prompt = f"{PROMPT} [[fault:{fault}]] [[length:30]]"
    seen: list[str] = []
    with pytest.raises(GenerationError, match="decode instance failed"):
        seen.extend(client.text_generation(prompt, max_new_tokens=30, stream=True))
    assert 1 <= len(seen) <= 30
    until(lambda: set(cluster.coordinator.states().values()) == {"ready"}, "all instances are back")


def test_failures_of_engines_are_generation_errors(cluster):
    with pytest.raises(TextGenerationError) as failure:
        client_of(cluster.coordinator).text_generation(f"{PROMPT} [[fault:decode_error@3]]", max_new_tokens=30)
    assert isinstance(failure.value, GenerationError)
