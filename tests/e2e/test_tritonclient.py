"""tritonclient over HTTP: token ids in and out."""

import numpy as np
import pytest
from dialects import MODEL
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from instances import tokens

IDS = np.array([tokens.encode("Tell me about the river")], dtype=np.uint32)


def client_of(coordinator) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(coordinator.url.removeprefix("http://"), network_timeout=30)


@pytest.fixture
def client(cluster):
    with client_of(cluster.coordinator) as client:
        yield client


def tensor(*, binary: bool = False) -> list[triton.InferInput]:
    given = triton.InferInput("input0", IDS.shape, "UINT32")
    given.set_data_from_numpy(IDS, binary_data=binary)
    return [given]


def test_health(client, lonely):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("nobody")
    with client_of(lonely) as other:
        assert other.is_server_live()
        assert not other.is_server_ready()


def test_metadata(client):
    assert client.get_server_metadata()["name"] == "pd-coordinator"
    metadata = client.get_model_metadata(MODEL)
    assert [i["datatype"] for i in metadata["inputs"] + metadata["outputs"]] == ["UINT32", "UINT32"]
    assert client.get_model_config(MODEL)["name"] == MODEL


@pytest.mark.parametrize("version", ["", "1"])
def test_infer(client, version: str):
    result = client.infer(MODEL, tensor(), version, request_id="mine", parameters={"max_new_tokens": 7})
    ids = result.as_numpy("output0")
    assert (ids.shape, ids.dtype) == ((1, 7), np.dtype(np.uint32))
    assert tokens.decode(ids[0].tolist())
    assert result.get_response()["id"] == "mine"


def test_infer_with_a_named_output(client):
    outputs = [triton.InferRequestedOutput("output0", binary_data=False)]
    result = client.infer(MODEL, tensor(), outputs=outputs, parameters={"max_new_tokens": 5})
    assert result.as_numpy("output0").shape == (1, 5)


def test_the_binary_default_is_refused_in_clear_words(client):
    with pytest.raises(InferenceServerException, match="binary tensor data is not supported, send JSON"):
        client.infer(MODEL, tensor(binary=True))


def test_compressed_requests(client):
    result = client.infer(MODEL, tensor(), parameters={"max_new_tokens": 5}, request_compression_algorithm="gzip")
    assert result.as_numpy("output0").shape == (1, 5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model_name": "nobody"}, "'nobody' does not exist"),
        ({"model_name": MODEL, "parameters": {"temperature": 9}}, "temperature"),
    ],
)
def test_errors_can_be_read(client, wrong: dict, words: str):
    with pytest.raises(InferenceServerException, match=words):
        client.infer(inputs=tensor(), **wrong)


def test_what_is_not_served_is_said(client, lonely):
    with pytest.raises(InferenceServerException, match="not served"):
        client.get_model_repository_index()
    with pytest.raises(InferenceServerException, match="not served"):
        client.get_inference_statistics(MODEL)
    with client_of(lonely) as other, pytest.raises(InferenceServerException, match="instance"):
        other.infer(MODEL, tensor())
