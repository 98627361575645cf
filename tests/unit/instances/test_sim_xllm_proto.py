"""The generated code is that of the .proto files, and the fields have the numbers of the protocol page §4."""

import subprocess
import sys
from pathlib import Path

import pytest

from instances.xllm.proto import engine_pb2, meta_pb2, service_pb2

ROOT = Path(__file__).parents[3]
FOLDER = Path("instances/xllm/proto")


def test_generation_gives_the_same_files(tmp_path):
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDER).glob("*.proto"))
    assert len(protos) == 3
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([*command, *protos], cwd=ROOT, check=True, timeout=60)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))
    assert made == sorted(path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*_pb2.py*"))
    for path in made:
        assert (tmp_path / path).read_bytes() == (ROOT / path).read_bytes(), path


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            engine_pb2.CompletionRequest,
            {"service_request_id": 23, "token_ids": 24, "routing": 25, "source_xservice_addr": 38},
        ),
        (
            engine_pb2.ChatRequest,
            {"service_request_id": 25, "token_ids": 26, "routing": 27, "source_xservice_addr": 42},
        ),
        (
            engine_pb2.ChatRequest,
            {"stop": 9, "max_tokens": 10, "top_k": 18, "logprobs": 21, "tools": 28, "top_logprobs": 22},
        ),
        (
            engine_pb2.CompletionRequest,
            {"logprobs": 9, "top_k": 19, "stop": 11, "x_request_time": 40, "num_return_sequences": 41},
        ),
        (engine_pb2.ClusterInfos, {"cluster_ids": 1, "device_ips": 2, "ports": 3, "dp_size": 4, "addrs": 5}),
        (engine_pb2.DisaggResponse, {"blocks_ids": 3, "dp_rank": 4, "linear_state_id": 6}),
        (
            engine_pb2.DisaggGenerationsRequest,
            {"k_cache_ids": 6, "v_cache_ids": 7, "block_ids": 8, "linear_state_id": 13},
        ),
        (engine_pb2.DisaggStreamGeneration, {"gen_status": 3, "outputs": 4, "usage": 5, "finished": 6}),
        (engine_pb2.DisaggStreamGeneration, {"finished_on_prefill_instance": 7}),
        (engine_pb2.InstanceClusterInfo, {"device_ips": 4, "ports": 5, "dp_size": 6, "kv_split_size": 7}),
        (service_pb2.InstanceMetaInfo, {"k_cache_ids": 5, "dp_size": 7, "addrs": 8, "ports": 10, "kv_split_size": 13}),
        (
            service_pb2.HeartbeatRequest,
            {"cache_event": 2, "load_metrics": 3, "latency_metrics": 4, "incarnation_id": 6},
        ),
        (meta_pb2.RpcMeta, {"compress_type": 3, "correlation_id": 4, "attachment_size": 5, "authentication_data": 7}),
    ],
)
def test_numbers(message, numbers):
    assert {name: message.DESCRIPTOR.fields_by_name[name].number for name in numbers} == numbers
