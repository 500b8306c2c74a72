"""Runs one group in this process: `python -m gpu_suite.run_group GROUP --device cuda --work DIR --out DIR`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
import time
from pathlib import Path

from gpu_suite.groups import BY_NAME
from gpu_suite.record import Context, Recorder
from gpu_suite.report import records_file

SPARE_S = 10.0  # of a group's time, for the case under way at its deadline


def main() -> int:
    """Returns 1 if the group failed outside its cases. Failures of cases are in their records only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=sorted(BY_NAME))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", type=Path, required=True, help="for records, and what is not to be kept")
    parser.add_argument("--out", type=Path, required=True, help="for files that are to be kept")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31), help="of the random inputs")
    parser.add_argument("--limit-s", type=float, default=0.0, help="it is ended after so long (default: its budget)")
    args = parser.parse_args()
    limit_s = args.limit_s or BY_NAME[args.group].budget_s
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5.0), exit=False)  # shows where a group hangs
    ends_s = time.monotonic() + limit_s - SPARE_S
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(records_file(args.work, args.group), args.group)
    recorder.note("seed", seed=args.seed, device=args.device, quick=args.quick)
    device = "cpu" if args.device == "cpu" else "cuda:0"
    context = Context(device, args.quick, args.work, args.out, recorder, args.seed, ends_s)
    with recorder.case("all"):
        importlib.import_module(BY_NAME[args.group].module).run(context)
        recorder.note("finished")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
