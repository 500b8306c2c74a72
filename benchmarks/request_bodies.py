"""The CPU time in µs that the gateway takes to read and check a request body: the least of many runs."""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from alignedserve.gateway.body.requests import parse_chat, parse_completion

SPOKEN = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What does os.path.join do?"},
]
OPTIONS = {"max_tokens": 64, "temperature": 0.7, "top_p": 0.95, "seed": 7, "stop": ["\n\n"], "user": "me"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}] * 1000
BODIES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "100,000 token ids": (parse_completion, {"prompt": list(range(100_000)), "max_tokens": 16}),
    "a prompt of 1 MiB": (parse_completion, {"prompt": "word " * 209_715, "max_tokens": 16}),
    "a short completion": (parse_completion, {"prompt": "Return a list of", "max_tokens": 48, "stream": True}),
    "a typical chat": (parse_chat, {"model": "tiny", "messages": SPOKEN, **OPTIONS, **STREAM}),
    "1,000 messages of parts": (parse_chat, {"messages": PARTS}),
}


def read(parse: Callable[[Any], Any], text: bytes) -> None:
    parse(orjson.loads(text))


def least_us(work: Callable[[], Any], rounds: int) -> float:
    number = max(1, int(0.02 / timeit.timeit(work, number=1)))
    return min(timeit.repeat(work, number=number, repeat=rounds, timer=time.process_time)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(f"{'body':24}{'check':>10}{'JSON and check':>16}")
    for name, (parse, body) in BODIES.items():
        text = orjson.dumps(body)
        check = least_us(partial(parse, orjson.loads(text)), rounds)
        both = least_us(partial(read, parse, text), rounds)
        print(f"{name:24}{check:10.1f}{both:16.1f}")


if __name__ == "__main__":
    main()
