"""Commands of `pd-coordinator`: parse, call, exit code; no logic.

Each imports what it needs when it is asked for: simulated instances start without the server, and the server without
them.
"""

# ruff: noqa: PLC0415  # see above

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

EXIT_BAD_CONFIG = 2
LONGEST_S = 86400.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, also where the reader of stdout has left (`| head`)."""
    status = 0
    try:
        words = sys.argv[1:] if argv is None else argv
        args = _parser(words[0] if words else "").parse_args(words)
        status = args.run(args)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        pass  # of stdout: those of sockets are met where they are used
    finally:
        _flush()
    return status


def _flush() -> None:
    """Write what is left; where nobody reads it, have it go nowhere, since Python would complain of it at its end."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _tell(*lines: str) -> None:
    """Print what has been found out; the exit status tells it, too, so a reader may have left."""
    with contextlib.suppress(BrokenPipeError):
        print(*lines, sep="\n")


def _serve(args: argparse.Namespace) -> int:
    from coordinator import config, serving

    try:
        return serving.serve(args.config)
    except config.ConfigError as error:
        return _refused(error)


def _check(args: argparse.Namespace) -> int:
    from coordinator import config
    from coordinator.parts import load_settings

    try:
        settings = load_settings(args.config)
    except config.ConfigError as error:
        return _refused(error)
    _tell(
        *(f"{args.config}: note: {note}" for note in config.notes(settings)),
        f"{args.config}: ok, {len(settings.cluster.instances)} instances",
    )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from coordinator import config, doctor

    options = doctor.Options(
        within_s=args.timeout,
        handover=not args.no_handover,
        handover_s=args.handover_timeout,
        most_pairs=args.pairs,
        total_s=args.within,
    )
    try:
        report = asyncio.run(doctor.examine(args.config, options))
    except config.ConfigError as error:
        return _refused(error)
    _tell(doctor.as_json(report) if args.json else doctor.as_text(report, all_of_it=args.verbose))
    return report.status


def _refused(error: Exception) -> int:
    print(error, file=sys.stderr)
    return EXIT_BAD_CONFIG


def _schema(_args: argparse.Namespace) -> int:
    from coordinator import config

    _tell(json.dumps(config.schema(), indent=2))
    return 0


def _key(args: argparse.Namespace) -> int:
    """Print a key and the line for the configuration; what they are goes to stderr, so that scripts get these alone."""
    from coordinator.security.keys import LEAST_CHARS, MAX_KEY_BYTES, new_hash, new_key

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
    from coordinator import demo

    return demo.run(demo.Options(args.engine, args.prefill, args.decode, args.port, once=args.once))


def _instance(args: argparse.Namespace) -> int:
    from instances import cli

    return cli.main(args)


def _top(args: argparse.Namespace) -> int:
    from coordinator.top import command

    return command.run(args)


def _version() -> str:
    """The version, and whether the hot modules are compiled."""
    relay = find_spec("coordinator.relay")
    compiled = relay is not None and not (relay.origin or "").endswith(".py")
    return f"{version('pd-coordinator')}{' (compiled)' if compiled else ''}"


def _parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The parser for one command; None: for all of them, which costs the import of what only some need."""
    parser = argparse.ArgumentParser(
        prog="pd-coordinator", description="The router in front of prefill/decode-disaggregated LLM instances."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the service; SIGTERM drains, SIGHUP reads the file again")
    serve.add_argument("--config", type=Path, required=True, metavar="FILE", help="cluster.yaml")
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="validate a configuration file; exit status 0 or 2")
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help="cluster.yaml")
    check.set_defaults(run=_check)

    _add_doctor(commands)

    demo_ = commands.add_parser("demo", help="a simulated cluster, the coordinator and one streamed request in one go")
    demo_.add_argument("--once", action="store_true", help="exit after the request instead of staying up")
    demo_.add_argument("--engine", default="mindie", metavar="E", help="engine protocol (default: %(default)s)")
    demo_.add_argument("--prefill", type=int, default=2, metavar="N", help="prefill instances (default: %(default)s)")
    demo_.add_argument("--decode", type=int, default=2, metavar="N", help="decode instances (default: %(default)s)")
    demo_.add_argument("--port", type=int, default=1025, metavar="N", help="data port (default: %(default)s)")
    demo_.set_defaults(run=_demo)

    instance = commands.add_parser("instance", help="one simulated engine instance that speaks the real wire protocol")
    if asked in (None, "instance"):
        from instances import cli

        cli.add_arguments(instance)
    instance.set_defaults(run=_instance)

    top_ = commands.add_parser("top", help="what a running coordinator does, in the terminal as it happens")
    if asked in (None, "top"):
        from coordinator.top import command

        command.add_arguments(top_)
    top_.set_defaults(run=_top)

    key = commands.add_parser("key", help="make an API key, or the hash of one that there is")
    key.add_argument("what", choices=("new", "hash"), help="new: print a key; hash: read one from stdin")
    key.add_argument("--name", default="new-key", metavar="N", help="its name in logs and metrics")
    key.set_defaults(run=_key)

    schema = commands.add_parser("schema", help="JSON Schema of the configuration file")
    schema.set_defaults(run=_schema)
    return parser


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor_ = commands.add_parser(
        "doctor",
        help="look at every instance and pair, and say what is wrong; exit status 0 well, 1 warnings, 2 faults",
    )
    doctor_.add_argument("--config", type=Path, required=True, metavar="FILE", help="cluster.yaml")
    doctor_.add_argument("--json", action="store_true", help="one JSON object instead of text")
    doctor_.add_argument("--verbose", action="store_true", help="show what is well, too")
    doctor_.add_argument("--no-handover", action="store_true", help="send nothing that makes an engine work")
    for name, default, what in (
        ("--timeout", 5.0, "for each question"),
        ("--handover-timeout", 30.0, "for the request over a pair"),
        ("--within", 300.0, "for all pairs"),
    ):
        text = f"seconds {what} (default: %(default)g)"
        doctor_.add_argument(name, type=_seconds, default=default, metavar="S", help=text)
    doctor_.add_argument(
        "--pairs", type=int, default=256, metavar="N", help="try at most so many pairs (default: %(default)s)"
    )
    doctor_.set_defaults(run=_doctor)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be more than 0 and less than {LONGEST_S:g}")
    return value
