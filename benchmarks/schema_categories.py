"""Which schemas each library follows, by JSONSchemaBench's categories: supported, refused, wrong.

Answers come from random logits over the shipped model's tokenizer, and those that end are validated. Without `--data`
the schemas are small ones in the manner of each category. `--data` is the dataset's folder `data`: one folder for
each category, one schema in each file.

    python benchmarks/schema_categories.py
    python benchmarks/schema_categories.py --data jsonschemabench/data --most 200 --json categories.json
    python benchmarks/schema_categories.py --suite JSON-Schema-Test-Suite/tests/draft2020-12
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import rigs  # noqa: F401

from support.grammars import LIBRARIES
from support.schema_categories import CATEGORIES, of_folder, outcome, table
from support.schema_suite import suite_outcome


def suite(libraries: list[str], folder: Path) -> int:
    found = {library: suite_outcome(library, folder) for library in libraries}
    for library, (counts, wrong) in found.items():
        print("\n".join([f"{library}: {dict(counts)}", *wrong]))
    return 1 if any(wrong for _, wrong in found.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the dataset's folder")
    parser.add_argument("--most", type=int, default=100, help="schemas of each category, with --data")
    parser.add_argument("--seeds", type=int, default=2, help="answers to each schema at each temperature")
    parser.add_argument("--library", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--suite", type=Path, help="a draft of the JSON Schema Test Suite, in place of the categories")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.suite is not None:
        return suite(options.library, options.suite)
    categories = CATEGORIES if options.data is None else dict(of_folder(options.data, options.most))
    found = {
        library: {name: outcome(library, schemas, options.seeds) for name, schemas in categories.items()}
        for library in options.library
    }
    wrong = [answer for outcomes in found.values() for one in outcomes.values() for answer in one.wrong]
    for library, outcomes in found.items():
        print(f"{library}\n\n{table(outcomes)}\n")
    print("\n".join(wrong))
    if options.json:
        counts = {
            library: {
                name: {"supported": one.supported, "refused": dict(one.refused), "wrong": one.wrong}
                for name, one in outcomes.items()
            }
            for library, outcomes in found.items()
        }
        options.json.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
