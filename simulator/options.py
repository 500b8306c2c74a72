"""The options of `alignedserve simulate` and their parsing. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from alignedserve.config_sources import load
from alignedserve.errors import ConfigError
from alignedserve.ranks.degrees import Degrees
from alignedserve.scheduler.ranks.names import DEFAULT as DEFAULT_PLACEMENT
from alignedserve.scheduler.ranks.names import PLACEMENTS, placement_class
from alignedserve.scheduler.systems import Topology, resolve
from alignedserve.simulator import trace_formats

DEFAULT_POLICY = "aligned"
DEFAULT_COST_MODEL = "rtxpro6000-llama-3.1-8b"
_MAX_RATES = 1000
_LEAST_RATE, _MOST_RATE = Decimal("1e-6"), Decimal("1e12")
_MAX_SEEDS = 1000
_MAX_RANKS = 1024  # as of decode instances
_SEED_END = 1 << 63  # result files store seeds in 64 bits
SUMMARY = "Replay a trace through the real scheduler in virtual time, and compare policies."
EPILOG = f"""trace formats, detected by content:
{trace_formats.EVERY}

example:
  alignedserve simulate --trace mix:short=0.95,requests=500 --rate 8 --policy aligned,fcfs,vllm --out results"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--trace", metavar="FILE|mix:…|chats:…", help="trace to replay (see below)")
    add("--policy", metavar="A,B,…", help=(
        f"policies, e.g. aligned,fcfs,vllm,package.module:Class (default {DEFAULT_POLICY})"
    ))  # fmt: skip
    add(
        "--cost-model",
        metavar="NAME|FILE|DIR",
        default=DEFAULT_COST_MODEL,
        help="cost model of a pass (default %(default)s)",
    )
    add(
        "--kernel-mode",
        metavar="MODE",
        default="split_kv",
        help="split_kv, no_split or no_split_longest_first",
    )
    add("--block-bandwidth", type=float, metavar="GB/S", help="no_split: read bandwidth of one thread block, in GB/s")
    add("--tensor-parallel", type=int, metavar="N", help=(
        "degree at which a folder's tables were measured (default: its suffix -tpN, else 1)"
    ))  # fmt: skip
    add("--prefill-cost-model", metavar="NAME|FILE|DIR", help=(
        "cost model of prefill instances, if they have another degree or another device (default: --cost-model)"
    ))  # fmt: skip
    add("--pipeline-parallel", type=int, metavar="N", help=(
        "stages of each prefill and decode instance, which share the model's layers (default 1)"
    ))  # fmt: skip
    add("--prefill-pp", type=int, metavar="N", help="the same for prefill instances")
    add("--decode-pp", type=int, metavar="N", help="the same for decode instances")
    add("--hardware", metavar="FILE", help="TOML or JSON: KV capacity, pool size, link rates; all optional")
    add("--print-hardware", action="store_true", help="print such a file with the effective values, and exit")
    add("--config", metavar="FILE", help="YAML configuration of the cluster's scheduler (see `alignedserve config`)")
    add("--instances", type=int, metavar="N", default=1, help="instances of colocated policies (default 1)")
    add("--prefill", type=int, metavar="N", default=1, help="prefill instances of disaggregated policies (default 1)")
    add("--decode", type=int, metavar="N", default=1, help="decode instances of disaggregated policies (default 1)")
    add("--ranks", type=int, metavar="N", default=1, help=(
        "decode ranks of each decode instance, which wait for each other in every iteration (default 1)"
    ))  # fmt: skip
    add("--placement", metavar="A,B,…", help=(
        f"with --ranks, instead of --policy: {', '.join(PLACEMENTS)} (default {DEFAULT_PLACEMENT})"
    ))  # fmt: skip
    add("--set", metavar="POLICY.KEY=VALUE", action="append", default=[], help=(
        "an option of a policy (vllm.max_num_seqs=64) or a configuration key for it "
        "(aligned.scheduler.min_batch_requests=64); repeatable"
    ))  # fmt: skip
    add("--rate", metavar="R|A:B:STEP", help="requests a second; a range runs every rate in it")
    add(
        "--clients", type=int, metavar="N", help="a closed loop: each of N clients sends its next request when one ends"
    )
    add("--cv", type=float, metavar="C", help="variation of generated arrivals: 1 Poisson (default), else Gamma")
    add("--slo-ttft", type=float, metavar="S", help="TTFT objective for goodput, in seconds")
    add("--slo-tpot", "--tpot-objective", type=float, metavar="S", help=(
        "TPOT objective for goodput and for joins of disaggregated policies, in seconds"
    ))  # fmt: skip
    add("--seed", type=int, metavar="N", default=0, help="seed of random lengths and arrivals (default 0)")
    add("--seeds", metavar="N|A,B,…", help="several seeds: N from --seed on, or a list; adds confidence intervals")
    add("--warmup-s", type=float, metavar="S", default=0.0, help="exclude everything before S seconds from the figures")
    add("--limit", type=int, metavar="N", help="replay only the first N requests")
    add("--save-trace", metavar="FILE", help="write the requests as Mooncake's JSONL, for load tools, and exit")
    add("--out", metavar="DIR", help="output folder for requests.csv, iterations.parquet, summary.json, report.html")
    add("--json", action="store_true", help="print only the summary on stdout, as JSON")


def rates_of(text: str | None) -> tuple[float | None, ...]:
    """Parse `R`, or `A:B:STEP` including both ends if the steps reach them. Raises ConfigError."""
    if text is None:
        return (None,)
    try:
        parts = [Decimal(part) for part in text.split(":")]
    except InvalidOperation:
        raise ConfigError(f"--rate takes R or A:B:STEP in requests a second, not {text!r}") from None
    if len(parts) not in (1, 3) or not all(part.is_finite() and part > 0 for part in parts):
        raise ConfigError(f"--rate takes R or A:B:STEP, each more than 0, not {text!r}")
    if not all(_LEAST_RATE <= part <= _MOST_RATE for part in parts):
        raise ConfigError(f"--rate {text}: must be {_LEAST_RATE:g} to {_MOST_RATE:g} requests a second")
    if len(parts) == 1:
        return (float(parts[0]),)
    first, last, step = parts
    if last < first or (last - first) / step > _MAX_RATES:
        raise ConfigError(f"--rate {text}: A must be at most B, with at most {_MAX_RATES} steps")
    return tuple(float(first + step * number) for number in range(int((last - first) / step) + 1))


def seeds_of(seed: int, text: str | None) -> tuple[int, ...]:
    """Parse `--seed` and `--seeds`. Raises ConfigError."""
    if text is None:
        return _checked((seed,), "--seed")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds takes a count, or seeds separated by commas, not {text!r}") from None
    if "," not in text and numbers[0] > _MAX_SEEDS:
        raise ConfigError(f"--seeds takes a count of at most {_MAX_SEEDS}, or seeds separated by commas")
    seeds = tuple(numbers) if "," in text else tuple(range(seed, seed + numbers[0]))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: give at least one seed, and none twice")
    return _checked(seeds, "--seeds")


def _checked(seeds: tuple[int, ...], option: str) -> tuple[int, ...]:
    if not all(-_SEED_END <= seed < _SEED_END for seed in seeds):
        raise ConfigError(f"{option}: a seed must be a 64-bit integer, between -2^63 and 2^63 - 1")
    return seeds


def policies_of(text: str, option: str = "policy") -> tuple[str, ...]:
    """Parse `--policy` or `--placement`. Raises ConfigError for no name, or one given twice."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--{option} {text!r}: give at least one {option}, and none twice")
    return names


def placements_of(ranks: int, placement: str | None, policy: str | None) -> tuple[str, ...]:
    """The placements to compare; none with one rank. Raises ConfigError for options that make no sense together."""
    if ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, not {ranks}")
    if ranks > _MAX_RANKS:
        raise ConfigError(f"--ranks must be at most {_MAX_RANKS}, not {ranks}")
    if ranks == 1:
        if placement is not None:
            raise ConfigError(f"--placement {placement}: one rank leaves nothing to choose; give --ranks 2 or more")
        return ()
    if policy is not None:
        for name in policies_of(policy):
            if resolve(name).topology is Topology.COLOCATED:
                raise ConfigError(f"--ranks {ranks}: {name} is a colocated policy, which has no decode instances")
        raise ConfigError(
            f"--ranks {ranks}: a placement decides which request joins, not --policy {policy}; give --placement instead"
        )
    names = policies_of(DEFAULT_PLACEMENT if placement is None else placement, "placement")
    for name in names:
        placement_class(name)
    return names


def stages_of(options: argparse.Namespace, colocated: Sequence[str], measured: int) -> tuple[int, int]:
    """The stages of a prefill and of a decode instance: by the options, else by the cluster's configuration.

    `colocated`: policies with neither. `measured`: the decode stages of the cost model's measured passes, which are
    those of an instance if more than one. Raises ConfigError.
    """
    both, own = options.pipeline_parallel, (options.prefill_pp, options.decode_pp)
    configured = (1, 1)
    if options.config is not None and options.ranks == 1:
        of_prefill, of_decode = degrees_of(options.config)
        configured = of_prefill.stages, of_decode.stages
    default = configured if both is None else (both, both)
    prefill, decode = (one if given is None else given for given, one in zip(own, default, strict=True))
    if min(*default, prefill, decode) < 1:
        raise ConfigError("--pipeline-parallel, --prefill-pp and --decode-pp must be at least 1")
    if max(prefill, decode) > 1 and options.ranks > 1:
        raise ConfigError(f"--ranks {options.ranks} shares experts: the layers are not divided among stages as well")
    asked = next((stages for stages in (own[1], both) if stages is not None), measured)
    if measured > 1 and asked != measured:
        raise ConfigError(
            f"decodes of --cost-model {options.cost_model} were measured on {measured} stages, not on {asked}: give a "
            "cost model of one stage, or no other number of stages"
        )
    if max(both or 1, *(stages or 1 for stages in own)) > 1 and colocated:
        raise ConfigError(
            f"stages are for prefill and decode instances, and {', '.join(colocated)} has neither; "
            "orca has stages of its own (--set orca.n_workers=2)"
        )
    return prefill, decode if measured == 1 else measured


def degrees_of(config_file: str) -> tuple[Degrees, Degrees]:
    """Those of prefill and decode instances in a configuration of the cluster."""
    config = load(config_file, environ={}, flags={})
    return config.degrees("prefill"), config.degrees("decode")


def settings_of(assignments: list[str], policies: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Parse `--set POLICY.KEY=VALUE`, by policy. Raises ConfigError."""
    found: dict[str, dict[str, str]] = {policy: {} for policy in policies}
    for assignment in assignments:
        left, separator, value = assignment.partition("=")
        owners = [policy for policy in policies if left.startswith(f"{policy}.")]
        if not separator or not owners:
            known = ", ".join(policies)
            raise ConfigError(f"--set takes POLICY.KEY=VALUE with a policy of --policy ({known}), not {assignment!r}")
        owner = max(owners, key=len)
        found[owner][left.removeprefix(f"{owner}.")] = value
    return found
