"""The command `pd-coordinator instance`: one simulated instance in this process."""

import argparse
import asyncio
import importlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import uvloop

from instances.faults import BadFault
from instances.options import ROLES, Options
from instances.run import ENGINES, run_instance
from instances.timing import Timing
from instances.xllm.settings import TYPES

_SHORTHANDS: Mapping[str, tuple[type, str]] = MappingProxyType(
    {
        "--world": (str, "microserving"),
        "--pe-start": (int, "microserving"),
        "--num-gpus": (int, "microserving"),
        "--layers": (int, "disaggpb"),
        "--kv-heads": (int, "disaggpb"),
        "--head-dim": (int, "disaggpb"),
        "--max-message-bytes": (int, "disaggpb"),
    }
)


def _setting(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("--engine", default="mindie", choices=sorted(ENGINES), help="protocol to speak")
    add("--role", required=True, choices=ROLES)
    add("--port", type=int, required=True, help="0 takes a free one, which is printed")
    add("--host", default="127.0.0.1", help="address to listen on, also the one that peers are told")
    add("--name", default="", help="name for faults with on=NAME (default: <role>-<port>)")
    add("--model", default="sim-model", help="served model name")
    add("--seed", type=int, default=0, help="the same on all instances that work together")
    add("--speed", type=float, default=1.0, help="2 is twice as fast, 0 is instant")
    add("--prefill-ms", type=float, default=5.0, help="base time of a prefill")
    add("--prefill-ms-per-token", type=float, default=0.1, help="for each prompt token that is not cached")
    add("--prefill-lanes", type=int, default=1, help="prefills at the same time")
    add("--decode-ms", type=float, default=10.0, help="one decode step of the whole batch")
    add("--decode-load", type=float, default=0.0, help="added share of --decode-ms for each further running request")
    add("--transfer-ms", type=float, default=0.0, help="moving KV to decode")
    add("--transfer-ms-per-token", type=float, default=0.0)
    add("--jitter", type=float, default=0.0, help="share by which times vary, 0 to 1")
    add("--answer-tokens", default="8-48", metavar="MIN-MAX", help="natural length of answers")
    add("--max-new-tokens", type=int, default=512, help="where a request sets no limit")
    add("--blocks", type=int, default=65536, help="KV blocks")
    add("--block-tokens", type=int, default=128, help="tokens per KV block")
    add("--prefix-blocks", type=int, default=0, help="blocks of the prefix cache, 0: none")
    add("--max-running", type=int, default=4096, help="most requests in one decode step")
    add("--startup-s", type=float, default=0.0, help="health answers 503 for so long")
    add("--listen-after-s", type=float, default=0.0, help="refuses connections for so long")
    add("--fault", action="append", default=[], metavar="FAULT", help="[selector:]name[@k][=value], repeatable")
    add("--type", choices=TYPES, help="xllm: as --set type=...")
    add("--pd-port", type=int, help="xllm: as --set pd_port=...")
    add("--etcd", metavar="URL", help="xllm: as --set etcd=...")
    add("--service", metavar="IP:PORT", help="xllm, without etcd: as --set service=...")
    for flag, (kind, engine) in _SHORTHANDS.items():
        add(flag, type=kind, help=f"{engine}: as --set {_setting(flag)}=...")
    add("--health", action="store_const", const=1, help="disaggpb: as --set health=1")
    add(
        "--write-tokenizer",
        action=_WriteTokenizer,
        metavar="DIR",
        help="write the tokenizer folder of xllm, after --engine disaggpb that of disaggpb, and exit",
    )
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="engine-specific setting, repeatable")


class _WriteTokenizer(argparse.Action):
    """Writes the folder and exits, whatever else is given."""

    def __call__(self, parser: argparse.ArgumentParser, given: argparse.Namespace, folder: object, *_: object) -> None:
        engine = "disaggpb" if given.engine == "disaggpb" else "xllm"
        importlib.import_module(f"instances.{engine}.vocabulary").write_tokenizer(Path(str(folder)))
        parser.exit(0)


def _pairs(given: Sequence[str], args: argparse.Namespace) -> dict[str, object]:
    names = ("type", "pd_port", "etcd", "service", "health", *map(_setting, _SHORTHANDS))
    named = {name: getattr(args, name) for name in names}
    pairs: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--set wants KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


def _bounds(text: str) -> tuple[int, int]:
    low, separator, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() or not separator)):
        raise ValueError(f"--answer-tokens wants MIN-MAX, not {text!r}")
    bounds = int(low), int(high or low)
    if bounds[0] > bounds[1]:
        raise ValueError(f"--answer-tokens wants MIN-MAX, not {text!r}")
    return bounds


def read_options(args: argparse.Namespace) -> Options:
    """Options of the instance; raises ValueError in plain words."""
    return Options(
        engine=args.engine,
        role=args.role,
        host=args.host,
        port=args.port,
        name=args.name,
        model=args.model,
        seed=args.seed,
        timing=Timing(
            prefill_ms=args.prefill_ms,
            prefill_token_ms=args.prefill_ms_per_token,
            prefill_lanes=args.prefill_lanes,
            decode_ms=args.decode_ms,
            decode_load=args.decode_load,
            transfer_ms=args.transfer_ms,
            transfer_token_ms=args.transfer_ms_per_token,
            jitter=args.jitter,
            speed=args.speed,
        ),
        answer_tokens=_bounds(args.answer_tokens),
        max_new_tokens=args.max_new_tokens,
        blocks=args.blocks,
        block_tokens=args.block_tokens,
        prefix_blocks=args.prefix_blocks,
        max_running=args.max_running,
        startup_s=args.startup_s,
        listen_after_s=args.listen_after_s,
        faults=tuple(args.fault),
        settings=_pairs(args.set, args),
    )


async def _serve(options: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with run_instance(options) as instance:
        more = instance.engine.announce()
        told = f"{instance.name}, {more}," if more else instance.name
        sys.stdout.write(f"{options.engine} {options.role} instance {told} at {instance.url}\n")
        sys.stdout.flush()
        await stop.wait()


def main(args: argparse.Namespace) -> int:
    """Run until SIGINT or SIGTERM; the exit code: 0, 2 for options that cannot be, 1 for an address in use."""
    try:
        uvloop.run(_serve(read_options(args)))
    except (ValueError, BadFault) as wrong:
        sys.stderr.write(f"pd-coordinator instance: {wrong}\n")
        return 2
    except BrokenPipeError:
        raise  # nobody reads stdout
    except OSError as busy:
        sys.stderr.write(f"pd-coordinator instance: cannot listen on {args.host}:{args.port}: {busy.strerror}\n")
        return 1
    return 0
