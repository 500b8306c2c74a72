"""The `alignedserve` command. Large packages are imported only on demand, so that `status` and `--help` are quick."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from alignedserve import __version__
from alignedserve.cluster.cli import cache_command, debug_bundle, explain_command, monitoring_command, top_command
from alignedserve.cluster.cli.operate import COMMANDS, add_url
from alignedserve.cluster.cli.refused_flags import REFUSED_FLAGS, refuse_unsupported
from alignedserve.errors import AlignedServeError, ConfigError, ModelError

# flag -> (configuration key, how argparse reads it)
SERVE_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "--model": (
        "model.path",
        {"metavar": "MODEL", "help": "tiny (shipped with the package), a local folder, or ORG/NAME on a hub"},
    ),
    "--served-model-name": ("model.served_name", {"metavar": "NAME", "help": "the model name that clients use"}),
    "--model-aliases": (
        "model.aliases",
        {"metavar": "A,B", "help": "more names that clients may use for the model, such as 'claude-*,gpt-*'"},
    ),
    "--policy": (
        "scheduler.policy",
        {
            "metavar": "NAME",
            "help": "how batches are formed (default aligned); `alignedserve policies` lists the names",
        },
    ),
    "--cost-model": (
        "scheduler.cost_model",
        {"metavar": "NAME|FILE|DIR", "help": "a measured cost model, for policy aligned-cost and the bubble metrics"},
    ),
    "--host": ("gateway.host", {"help": "address that HTTP listens on (default 127.0.0.1)"}),
    "--port": ("gateway.port", {"type": int, "help": "HTTP port (default 8000)"}),
    "--grpc-port": ("gateway.grpc_port", {"type": int, "help": "gRPC port (default 9000)"}),
    "--device": ("cluster.device", {"metavar": "auto|cpu|cuda", "help": "where instances run"}),
    "--dtype": ("model.dtype", {"metavar": "auto|bfloat16|float32|float16", "help": "data type of weights and KV"}),
    "--prefill": ("cluster.prefill", {"type": int, "metavar": "N", "help": "prefill instances (default 1)"}),
    "--decode": ("cluster.decode", {"type": int, "metavar": "N", "help": "decode instances (default 1)"}),
    "--tensor-parallel-size": (
        "cluster.tensor_parallel",
        {"type": int, "metavar": "N", "help": "ranks that share each layer of an instance's model (default 1)"},
    ),
    "--pipeline-parallel-size": (
        "cluster.pipeline_parallel",
        {"type": int, "metavar": "N", "help": "stages that share out an instance's layers (default 1)"},
    ),
    "--prefill-tp": (
        "prefill.tensor_parallel",
        {"type": int, "metavar": "N", "help": "--tensor-parallel-size of prefill instances"},
    ),
    "--decode-tp": (
        "decode.tensor_parallel",
        {"type": int, "metavar": "N", "help": "--tensor-parallel-size of decode instances"},
    ),
    "--prefill-pp": (
        "prefill.pipeline_parallel",
        {"type": int, "metavar": "N", "help": "--pipeline-parallel-size of prefill instances"},
    ),
    "--decode-pp": (
        "decode.pipeline_parallel",
        {"type": int, "metavar": "N", "help": "--pipeline-parallel-size of decode instances"},
    ),
    "--prefill-nodes": (
        "prefill.nodes",
        {"type": int, "metavar": "N", "help": "nodes over which the stages of a prefill instance are spread"},
    ),
    "--decode-nodes": (
        "decode.nodes",
        {"type": int, "metavar": "N", "help": "the same for decode instances"},
    ),
    "--decode-ep": (
        "decode.expert_parallel",
        {"type": int, "metavar": "N", "help": "ranks of decode instances that share a mixture's experts (CPUs only)"},
    ),
    "--spares": ("supervisor.spares", {"type": int, "metavar": "N", "help": "warm spare processes"}),
    "--chat-template": (
        "model.chat_template",
        {"metavar": "FILE", "help": "a Jinja chat template that replaces the model's own"},
    ),
    "--tool-parser": ("model.tool_parser", {"metavar": "NAME", "help": "format of the model's tool calls"}),
    "--reasoning-parser": ("model.reasoning_parser", {"metavar": "NAME", "help": "format of the model's reasoning"}),
    "--api-key-file": (
        "gateway.api_key_file",
        {"metavar": "FILE", "help": "file with one API key per line; /v1/* and gRPC then require a key"},
    ),
    "--request-log": (
        "gateway.request_log",
        {"metavar": "FILE", "help": "append a JSON line for every request: lengths and timestamps, never text"},
    ),
    "--kv-disk-path": (
        "kv_pool.disk_path",
        {"metavar": "DIR", "help": "folder on a local SSD for cached KV that no longer fits in memory"},
    ),
    "--kv-disk-gib": ("kv_pool.disk_gib", {"type": float, "metavar": "GIB", "help": "how much of it each node uses"}),
    "--pinned-prompts": (
        "kv_pool.pinned_prompts",
        {"metavar": "FILE", "help": "beginnings of prompts to keep in the prefix cache: JSON objects, one a line"},
    ),
    "--batches-folder": (
        "batches.folder",
        {"metavar": "DIR", "help": "folder for files and batches; without it /v1/files and /v1/batches are refused"},
    ),
    "--ttft-objective": (
        "scheduler.ttft_objective_s",
        {"type": float, "metavar": "SECONDS", "help": "refuse requests whose TTFT is predicted to exceed this"},
    ),
    "--tpot-objective": (
        "scheduler.tpot_objective_s",
        {
            "type": float,
            "metavar": "SECONDS",
            "help": "refuse requests, and hold joins back, if TPOT is predicted to exceed this",
        },
    ),
    "--log-format": ("log.format", {"metavar": "text|json", "help": "format of log records"}),
    "--log-dir": ("log.dir", {"metavar": "DIR", "help": "folder for one log file per process"}),
}
LOOKS: dict[str, Callable[[argparse.Namespace], int]] = {
    "cache": cache_command.run,
    "debug-bundle": debug_bundle.run,
    "top": top_command.run,
    "explain": explain_command.run,
    "monitoring": monitoring_command.run,
}
# The flags that `profile` takes. It serves in a small cluster with a configuration of its own.
PROFILE_FLAGS = (
    *("--model", "--device", "--dtype", "--trust-remote-code", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--prefill-tp", "--decode-tp", "--prefill-pp", "--decode-pp", "--decode-ep"),
)
SERVE_SWITCHES: dict[str, tuple[str, bool, str]] = {
    "--no-prefetch": (
        "cluster.prefetch",
        False,
        "no candidate buffers: copy KV from the pool to decode instances directly",
    ),
    "--no-dashboard": ("gateway.dashboard", False, "do not serve the live page at / and /dashboard"),
    "--no-prefix-cache": ("kv_pool.prefix_cache", False, "do not keep the KV of ended requests"),
    "--verify-kv": ("kv_pool.verify", True, "compare a checksum of every KV block after each copy"),
    "--trust-remote-code": ("model.trust_remote_code", True, "run Python code that comes with the model"),
    "--share-gpu": ("cluster.share_gpu", True, "let several instances share one GPU"),
    "--traces": ("traces.enabled", True, "send OpenTelemetry traces of requests, to OTEL_EXPORTER_OTLP_ENDPOINT"),
}


class _Parser(argparse.ArgumentParser):
    """Prints a usage error in one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        print(f"alignedserve: error: {message} (see `{self.prog} --help`)", file=sys.stderr)
        raise SystemExit(2)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exits with an error that names the arguments that this command does not know."""
        message = f"unrecognized arguments: {' '.join(unknown)}"
        flags = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        if nearest := difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1):
            message += f"; the nearest is {nearest[0]}"
        self.error(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed options. An unknown argument is refused by the parser of its command, which names its own `--help`."""
    parser, commands = make_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        commands[options.command].refuse(unknown)
    return options


def make_parser() -> tuple[_Parser, Mapping[str, _Parser]]:
    """The parser, and the parsers of the commands by name."""
    parser = _Parser(
        prog="alignedserve",
        description="Serve a language model with prefill and decode in separate processes.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, summary: str) -> _Parser:
        return commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)

    serve = add("serve", "Start a cluster and serve a model until Ctrl-C.")
    _add_configuration(serve)
    for flag, feature in REFUSED_FLAGS.items():
        serve.add_argument(flag, nargs="?", const=True, help=argparse.SUPPRESS, metavar=feature)
    run_batch = add("run-batch", "Answer the requests in a JSONL file, with a running server or one for this run.")
    _add_run_batch(run_batch)
    config = add("config", "Print the effective configuration, with a line of documentation for each key.")
    _add_configuration(config)
    status = add("status", "List the processes of the newest running cluster of this user.")
    add_url(status, "newest")
    status.add_argument("--json", action="store_true", help="print JSON and nothing else")
    for name, command in COMMANDS.items():
        command.add_options(add(name, command.summary))
    top_command.add_options(add("top", "Show the newest running cluster of this user live, in the terminal."))
    debug_bundle.add_options(add("debug-bundle", "Put what an issue report needs into one archive, without secrets."))
    explain_command.add_options(add("explain", "Say where a request's time went, and what would help."))
    monitoring_command.add_options(add("monitoring", "Write the files of Prometheus and Grafana for a cluster."))
    cache_command.add_options(add("cache", "Pin, list and drop what the prefix caches of a running cluster keep."))
    doctor = add("doctor", "Show what this machine offers for a configuration, and what is missing.")
    _add_configuration(doctor)
    doctor.add_argument(
        "--live", action="store_true", help="make a running cluster recount its stores and check its state"
    )
    doctor.add_argument("--url", help="with --live: URL of a gateway (default: this user's newest cluster)")
    doctor.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _add_profile(add("profile", "Measure this machine with a model, and write a cost model that predicts its passes."))
    from alignedserve.simulator.options import SUMMARY, add_options

    add_options(add("simulate", SUMMARY))
    policies = add("policies", "List the policies that --policy accepts, one per line.")
    policies.add_argument("--json", action="store_true", help="print JSON and nothing else")
    add("version", "Print the version.")
    return parser, commands.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 0, 2 for an unusable configuration or model, 1 for later failures."""
    if not sys.platform.startswith("linux"):
        print(f"alignedserve: error: only Linux is supported, this is {sys.platform}", file=sys.stderr)
        return 2
    options = parse(argv)
    try:
        return _run(options, sys.argv[1:] if argv is None else argv)
    except (ConfigError, ModelError) as error:
        return _fail(error, 2)
    except AlignedServeError as error:
        return _fail(error, 1)
    except BrokenPipeError:  # `alignedserve config | head`
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    match options.command:
        case "version":
            print(f"alignedserve {__version__}")
            return 0
        case "status":
            from alignedserve.cluster.cli.status_command import show_status

            return show_status(options.url, as_json=options.json, api_key_file=options.api_key_file)
        case name if name in COMMANDS:
            return COMMANDS[name].run(options)
        case name if name in LOOKS:
            return LOOKS[name](options)
        case "policies":
            from alignedserve.cluster.cli.policies_command import list_policies

            return list_policies(as_json=options.json)
        case "run-batch":
            from alignedserve.cluster.cli.run_batch import run_batch

            _configuration(options)  # raises ConfigError before anything is started
            return run_batch(options, _given(options))
        case "config":
            from alignedserve.config_sources import to_yaml

            print(to_yaml(_configuration(options)), end="")
            return 0
        case "profile":
            from alignedserve.cluster.cli.profile_command import run_profile

            return run_profile(_configuration(options), options.out, options.seconds, not options.no_cluster)
        case "simulate":
            from alignedserve.simulator.cli import simulate_command

            return simulate_command(options, argv)
        case "doctor":
            if options.live:
                from alignedserve.cluster.cli.live_command import check_live

                key_file = getattr(options, "gateway.api_key_file")
                return check_live(options.url, as_json=options.json, api_key_file=key_file)
            from alignedserve.cluster.cli.doctor import run_doctor

            return run_doctor(_configuration(options), as_json=options.json)
        case _:
            from alignedserve.cluster.cli.serve_command import serve

            refuse_unsupported(vars(options))
            return serve(_configuration(options))


def _add_configuration(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add the flags that set configuration keys. A flag that is not given is None, so that lower layers apply."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with the configuration")
    for flag, (key, how) in SERVE_FLAGS.items():
        if only is None or flag in only:
            parser.add_argument(flag, dest=key, default=None, **how)
    for flag, (key, value, summary) in SERVE_SWITCHES.items():
        if only is None or flag in only:
            parser.add_argument(flag, dest=key, action="store_const", const=value, default=None, help=summary)
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="any other configuration key; may be given several times",
    )


def _add_run_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input", metavar="FILE", required=True, help="requests in OpenAI's batch format")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the answers, in the order of the input")
    errors = "lines that failed (default: the name of the output with .errors before its ending)"
    parser.add_argument("-e", "--errors", metavar="FILE", help=errors)
    parser.add_argument(
        "--url", help="URL of a running server that keeps batches; without it the options below start one"
    )
    _add_configuration(parser)


def _add_profile(profile: argparse.ArgumentParser) -> None:
    _add_configuration(profile, PROFILE_FLAGS)
    profile.add_argument("--out", metavar="FILE", required=True, help="the JSON file to write")
    seconds = "measurement time in seconds, excluding start-up (default 60, on a GPU 25)"
    profile.add_argument("--seconds", type=float, metavar="S", help=seconds)
    profile.add_argument(
        "--no-cluster", action="store_true", help="only measure passes, without serving in a small cluster"
    )


def _given(options: argparse.Namespace) -> list[str]:
    """The configuration that was given by flags, as arguments for another command."""
    given = ["--config", options.config] if options.config else []
    found = [f"{key}={value}" for key, value in vars(options).items() if "." in key and value is not None]
    return given + [word for assignment in (*options.set, *found) for word in ("--set", assignment)]


def _configuration(options: argparse.Namespace) -> Any:
    from alignedserve.cluster.cli.refused_flags import explain_unknown_key
    from alignedserve.config_sources import load, value_of
    from alignedserve.errors import UnknownKeyError
    from alignedserve.scheduler.systems import served_settings

    try:
        flags: dict[str, Any] = {}
        for assignment in options.set:
            key, separator, text = assignment.partition("=")
            if not separator:
                raise ConfigError(f"--set takes SECTION.KEY=VALUE, not {assignment!r}")
            flags[key] = value_of(key, text, "--set")
        # A key's own flag overrides --set.
        flags |= {key: value for key, value in vars(options).items() if "." in key and value is not None}
        return load(options.config, flags=flags, settings_of=served_settings)
    except UnknownKeyError as error:
        raise explain_unknown_key(error) from error


def _fail(error: AlignedServeError, status: int) -> int:
    print(f"alignedserve: error: {' '.join(error.message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
