"""The compiled messages are those of the .proto files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROTOS = sorted((ROOT / "coordinator/wire/protobuf").glob("*.proto"))

pytestmark = pytest.mark.uncompiled  # the sources


def test_there_are_files():
    assert PROTOS


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_compiling_again_gives_the_same(proto, tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", str(ROOT), f"--python_out={tmp_path}",
               f"--mypy_out={tmp_path}", str(proto.relative_to(ROOT))]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for made in sorted(tmp_path.rglob("*_pb2.py*")):
        kept = ROOT / made.relative_to(tmp_path)
        assert kept.read_text() == made.read_text(), f"{kept.name} is out of date: compile {proto.name} again"
    assert len(list(tmp_path.rglob("*_pb2.py*"))) == 2
