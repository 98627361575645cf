"""Commands of `pd-coordinator`: parse, call, exit code; no logic."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from coordinator import config, demo, serving
from coordinator.parts import load_settings
from coordinator.security.keys import LEAST_CHARS, MAX_KEY_BYTES, new_hash, new_key

EXIT_BAD_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        return 130
    return status


def _serve(args: argparse.Namespace) -> int:
    try:
        return serving.serve(args.config)
    except config.ConfigError as error:
        return _refused(error)


def _check(args: argparse.Namespace) -> int:
    try:
        settings = load_settings(args.config)
    except config.ConfigError as error:
        return _refused(error)
    for note in config.notes(settings):
        print(f"{args.config}: note: {note}")
    print(f"{args.config}: ok, {len(settings.cluster.instances)} instances")
    return 0


def _refused(error: config.ConfigError) -> int:
    print(error, file=sys.stderr)
    return EXIT_BAD_CONFIG


def _schema(_args: argparse.Namespace) -> int:
    print(json.dumps(config.schema(), indent=2))
    return 0


def _key(args: argparse.Namespace) -> int:
    """Print a key and the line for the configuration; what they are goes to stderr, so that scripts get these alone."""
    if args.what == "new":
        key, salted = new_key(), False
        print("the key, shown this once, and its line for auth.keys or auth.management_keys:", file=sys.stderr)
        print(key)
    else:
        key, salted = sys.stdin.readline().strip(), True
        if not LEAST_CHARS <= len(key.encode()) <= MAX_KEY_BYTES or not key.isascii() or not key.isprintable():
            print(f"a key on stdin must have {LEAST_CHARS} to {MAX_KEY_BYTES} ASCII characters", file=sys.stderr)
            return EXIT_BAD_CONFIG
    print(f'- {{name: {args.name}, hash: "{new_hash(key, salted=salted)}"}}')
    return 0


def _demo(args: argparse.Namespace) -> int:
    return demo.run(demo.Options(args.engine, args.prefill, args.decode, args.port, once=args.once))


def _instance(args: argparse.Namespace) -> int:
    from instances import cli  # noqa: PLC0415  # the simulators are loaded by those who ask for one

    return cli.main(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pd-coordinator", description="The router in front of prefill/decode-disaggregated LLM instances."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('pd-coordinator')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the service; SIGTERM drains, SIGHUP reads the file again")
    serve.add_argument("--config", type=Path, required=True, metavar="FILE", help="cluster.yaml")
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="validate a configuration file; exit status 0 or 2")
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help="cluster.yaml")
    check.set_defaults(run=_check)

    demo_ = commands.add_parser("demo", help="a simulated cluster, the coordinator and one streamed request in one go")
    demo_.add_argument("--once", action="store_true", help="exit after the request instead of staying up")
    demo_.add_argument("--engine", default="mindie", metavar="E", help="engine protocol (default: %(default)s)")
    demo_.add_argument("--prefill", type=int, default=2, metavar="N", help="prefill instances (default: %(default)s)")
    demo_.add_argument("--decode", type=int, default=2, metavar="N", help="decode instances (default: %(default)s)")
    demo_.add_argument("--port", type=int, default=1025, metavar="N", help="data port (default: %(default)s)")
    demo_.set_defaults(run=_demo)

    instance = commands.add_parser("instance", help="one simulated engine instance that speaks the real wire protocol")
    _add_instance_arguments(instance)
    instance.set_defaults(run=_instance)

    key = commands.add_parser("key", help="make an API key, or the hash of one that there is")
    key.add_argument("what", choices=("new", "hash"), help="new: print a key; hash: read one from stdin")
    key.add_argument("--name", default="new-key", metavar="N", help="its name in logs and metrics")
    key.set_defaults(run=_key)

    schema = commands.add_parser("schema", help="JSON Schema of the configuration file")
    schema.set_defaults(run=_schema)
    return parser


def _add_instance_arguments(parser: argparse.ArgumentParser) -> None:
    from instances import cli  # noqa: PLC0415  # see _instance

    cli.add_arguments(parser)
