"""`serve(...)` at the end of a pattern's file: runs a coordinator with it."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .loading import LOADING
from .router import Router


def serve(  # noqa: PLR0913  # MLC-LLM's signature; all are given by name
    model: str,
    model_lib: str | None = None,
    *,
    router_host: str = "127.0.0.1",
    router_port: int = 8000,
    endpoint_hosts: Sequence[str] = ("127.0.0.1",),
    endpoint_ports: Sequence[int] = (8080,),
    endpoint_num_gpus: Sequence[int] = (1,),
    enable_prefix_cache: bool = False,
    router_mode: str = "disagg",
    pd_balance_factor: float = 0.0,
    router_type: type[Router] = Router,
) -> None:
    """Run a coordinator with a pattern, in place of this process; does nothing while the coordinator loads the file.

    The engines must be there: unlike MLC-LLM's, this one does not start them, so `model_lib` and `enable_prefix_cache`
    are the engines' business. Endpoint 0 is prefill, all others are decode; with one endpoint it is hybrid.

    Raises:
        ValueError: the lists are not equally long, or the class is not in a file.
    """
    del model_lib, enable_prefix_cache
    if LOADING.get():
        return
    document = cluster_of(
        list(zip(endpoint_hosts, endpoint_ports, endpoint_num_gpus, strict=True)),
        engine=engine_of(router_type),
        settings={"mode": router_mode, "pd_balance_factor": pd_balance_factor},
        listen=(router_host, router_port),
        tokenizer=model if (Path(model) / "tokenizer.json").is_file() else None,
    )
    with tempfile.NamedTemporaryFile("w", prefix="pattern-", suffix=".yaml", delete=False) as file:
        json.dump(document, file)
    os.execv(sys.executable, [sys.executable, "-m", "coordinator", "serve", "--config", file.name])  # noqa: S606


def engine_of(router_type: type[Router]) -> str:
    """The name of a router's class in a configuration; raises ValueError."""
    if router_type is Router:
        return "microserving"
    file = getattr(sys.modules.get(router_type.__module__), "__file__", None)
    if file is None:
        raise ValueError(f"{router_type.__name__} is not in a file")
    return f"{Path(file).absolute()}:{router_type.__name__}"


def cluster_of(
    endpoints: Sequence[tuple[str, int, int]],
    *,
    engine: str,
    settings: dict[str, object],
    listen: tuple[str, int],
    tokenizer: str | None,
) -> dict[str, object]:
    """The configuration for endpoints of (host, port, GPUs)."""
    instances: list[dict[str, object]] = []
    first_pe = 0
    for host, port, gpus in endpoints:
        role = "hybrid" if len(endpoints) == 1 else "decode" if instances else "prefill"
        address = f"[{host}]" if ":" in host else host
        instances.append({"role": role, "url": f"http://{address}:{port}", "recv_rank": first_pe})
        first_pe += gpus
    return {
        "server": {"host": listen[0], "port": listen[1], "management_port": 0},
        "cluster": {"engine": engine, "tokenizer": tokenizer, "instances": instances},
        "engines": {engine: settings},
    }
