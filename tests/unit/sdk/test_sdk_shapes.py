"""Requests and responses under MLC-LLM's names, `serve`, and loading of files."""

import json
import sys
from pathlib import Path

import pytest

from coordinator.sdk import Router, microserving_entrypoints, openai_api_protocol, serve
from coordinator.sdk import serving as serving_module
from coordinator.sdk.loading import load_file, place_of


def test_the_schema_is_sent_under_its_own_name():
    """Dumped without thinking of aliases, twice, as the tutorial does it."""
    body = {"prompt": "x", "response_format": {"type": "json_object", "schema": '{"a": 1}'}}
    request = openai_api_protocol.CompletionRequest.model_validate_json(json.dumps(body))
    assert request.response_format.json_schema == '{"a": 1}'
    asked = microserving_entrypoints.PrepRecvRequest(**request.model_dump(), end=-1)
    for dumped in (asked.model_dump(), json.loads(asked.model_dump_json())):
        assert dumped["response_format"] == {"type": "json_object", "schema": '{"a": 1}'}
    made = openai_api_protocol.RequestResponseFormat(type="json_object", json_schema="{}")
    assert made.model_dump() == {"type": "json_object", "schema": "{}"}


def test_what_is_not_known_is_kept():
    request = openai_api_protocol.CompletionRequest(prompt=[1], top_k=5)
    send = microserving_entrypoints.RemoteSendRequest(
        **request.model_dump(), begin=0, end=-1, kv_addr_info="WzBd", recv_rank=2
    )
    assert (send.model_dump()["top_k"], send.recv_rank, send.prompt) == (5, 2, [1])
    start = microserving_entrypoints.StartGenerateRequest(**request.model_dump(), begin=-1)
    assert start.begin == -1


def test_a_chunk_of_the_engine():
    chunk = openai_api_protocol.CompletionResponse.model_validate_json(
        '{"id":"1","choices":[{"index":0,"text":"a","finish_reason":"preempt","logprobs":{"text_offset":[0],'
        '"token_logprobs":[null],"tokens":["a"],"top_logprobs":[{}]}}],"usage":null,"created":1,"model":"m"}'
    )
    assert chunk.choices[0].finish_reason == "preempt"
    assert chunk.choices[0].logprobs.token_logprobs == [None]


# --- files


def write(path, text):
    path.write_text(text)
    return path


def test_a_file_is_executed_once_and_its_serve_does_nothing(tmp_path):
    path = write(
        tmp_path / "mine.py",
        "from coordinator.sdk import Router, serve\ncount = 0\n"
        "class Mine(Router): pass\n"
        "serve(model='/m', endpoint_hosts=['a'], endpoint_ports=[1], endpoint_num_gpus=[1], router_type=Mine)\n",
    )
    module = load_file(path)
    assert issubclass(module.Mine, Router)
    assert load_file(path) is module
    assert sys.modules[module.Mine.__module__] is module


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "was never closed in line 1"),
        ("import json\n\nraise KeyError('secret')\n", "KeyError in {path}, line 3"),
        ("import nowhere_at_all\n", "ModuleNotFoundError in {path}, line 1"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(tmp_path, text, says):
    path = write(tmp_path / "bad.py", text)
    before = set(sys.modules)
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load_file(path)
    assert says.format(path=path) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert {name for name in sys.modules if "pd_pattern" in name} <= before


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no Python file"):
        load_file(tmp_path / "none.py")


def test_a_file_that_ends_the_process_does_so(tmp_path):
    path = write(tmp_path / "leaves.py", "raise SystemExit(3)\n")
    with pytest.raises(SystemExit):
        load_file(path)


def test_the_place_of_an_error_is_the_last_line_of_the_file_itself(tmp_path):
    path = write(tmp_path / "calls.py", "import json\ndef f():\n    return json.loads('{')\n")
    module = load_file(path)
    with pytest.raises(ValueError, match="Expecting") as caught:
        module.f()
    assert place_of(caught.value, str(path)) == f"JSONDecodeError in {path}, line 3"
    assert "decoder.py" in place_of(caught.value, "")
    assert place_of(ValueError(), "") == "ValueError"


# --- serve


def run_serve(monkeypatch, **given):
    ran = []
    monkeypatch.setattr(serving_module.os, "execv", lambda *command: ran.append(command))
    serve(**given)
    [(executable, command)] = ran
    assert executable == sys.executable
    assert command[1:5] == ["-m", "coordinator", "serve", "--config"]
    return json.loads(Path(command[5]).read_text())


def test_serve_runs_a_coordinator_with_the_pattern(monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    path = write(tmp_path / "pattern.py", "from coordinator.sdk import Router\nclass Mine(Router): pass\n")
    document = run_serve(
        monkeypatch,
        model=str(tmp_path),
        model_lib="/lib",
        router_host="127.0.0.1",
        router_port=9123,
        endpoint_hosts=["127.0.0.1", "::1", "10.0.0.3"],
        endpoint_ports=[9124, 9125, 9126],
        endpoint_num_gpus=[2, 4, 2],
        enable_prefix_cache=False,
        pd_balance_factor=0.2,
        router_type=load_file(path).Mine,
    )
    engine = f"{path}:Mine"
    assert document["cluster"]["engine"] == engine
    assert document["cluster"]["instances"] == [
        {"role": "prefill", "url": "http://127.0.0.1:9124", "recv_rank": 0},
        {"role": "decode", "url": "http://[::1]:9125", "recv_rank": 2},
        {"role": "decode", "url": "http://10.0.0.3:9126", "recv_rank": 6},
    ]
    assert document["cluster"]["tokenizer"] == str(tmp_path)
    assert document["engines"] == {engine: {"mode": "disagg", "pd_balance_factor": 0.2}}
    assert document["server"] == {"host": "127.0.0.1", "port": 9123, "management_port": 0}


def test_serve_without_a_pattern_is_the_engine_itself(monkeypatch):
    document = run_serve(monkeypatch, model="/m", router_mode="round-robin")
    assert document["cluster"]["engine"] == "microserving"
    assert document["cluster"]["instances"][0]["role"] == "hybrid"
    assert document["cluster"]["tokenizer"] is None


def test_serve_wants_lists_of_one_length(monkeypatch):
    with pytest.raises(ValueError, match="zip"):
        run_serve(monkeypatch, model="/m", endpoint_ports=[1, 2])


def test_serve_needs_a_class_that_is_in_a_file(monkeypatch):
    class Nowhere(Router):
        """Made here, as far as anybody can tell."""

    Nowhere.__module__ = "not a module"
    with pytest.raises(ValueError, match="is not in a file"):
        run_serve(monkeypatch, model="/m", router_type=Nowhere)
