"""Draws the documentation's diagrams: `python tools/docs/diagrams.py` writes them to docs/images/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from drawing import Drawing

IMAGES = Path(__file__).parents[2] / "docs/images"


def processes() -> Drawing:
    d = Drawing(
        940,
        560,
        "Processes and planes",
        "Clients reach gateway replicas through HAProxy. Gateways submit requests to the scheduler, which commands "
        "prefill instances, the pool and decode instances over gRPC streams. Workers send tokens straight to the "
        "gateway. KV moves between prefill instances, pool and decode instances through memory. The supervisor has a "
        "stream to every role.",
    )
    d.box(30, 24, 130, 46, ["clients", "HTTP, gRPC"])
    d.box(240, 24, 130, 46, ["HAProxy", "of Ray Serve"])
    d.box(450, 14, 220, 66, ["gateway", "owns each request until", "its last token"], "blue")
    d.box(720, 110, 190, 66, ["supervisor", "starts, watches,", "replaces every role"])
    d.box(450, 150, 220, 66, ["scheduler", "quad-tree, batches,", "routing, admission"], "blue")
    d.arrow([(160, 47), (240, 47)], "blue", "thick", both=True)
    d.arrow([(370, 47), (450, 47)], "blue", "thick", both=True)
    d.arrow([(560, 80), (560, 150)], both=True)
    d.text(568, 120, "requests", "small")
    d.frame(30, 262, 880, 226, "a node")
    d.box(60, 310, 220, 150, [], "blue")
    d.text(170, 334, "prefill instance", "bold", "middle")
    d.box(76, 348, 188, 28, ["weights, cache"])
    d.box(76, 382, 188, 28, ["candidate batch buffer"], "amber")
    d.box(76, 416, 188, 28, ["candidate request buffer"], "amber")
    d.box(390, 360, 160, 100, ["KV pool", "host memory:", "waiting requests, and", "copies of running ones"], "amber")
    d.box(660, 310, 220, 150, [], "green")
    d.text(770, 334, "decode instance", "bold", "middle")
    d.box(676, 348, 188, 28, ["weights"])
    d.box(676, 382, 188, 62, ["cache", "the running batch"], "amber")
    d.box(390, 290, 160, 44, ["node agent", "memory, ends processes"])
    d.arrow([(450, 190), (200, 190), (200, 310)])
    d.arrow([(640, 216), (640, 240), (750, 240), (750, 310)])
    d.text(300, 184, "commands", "small")
    d.arrow([(120, 310), (120, 110), (470, 110), (470, 80)], "green")
    d.text(210, 104, "tokens, straight to the gateway", "small")
    d.arrow([(694, 310), (694, 60), (670, 60)], "green")
    d.arrow([(264, 400), (390, 400)], "amber", "thick", both=True)
    d.arrow([(264, 436), (320, 436), (320, 474), (620, 474), (620, 430), (676, 430)], "amber", "thick", both=True)
    d.arrow([(550, 400), (676, 400)], "amber", "thick", both=True)
    d.arrow([(815, 176), (815, 262)], "ink", "dashed", both=True)
    d.text(823, 208, "heartbeats up,", "small")
    d.text(823, 224, "the view down", "small")
    y = 525
    for x, ink, kind, words in (
        (40, "blue", "thick", "client plane"),
        (200, "ink", "", "control plane (gRPC streams)"),
        (450, "green", "", "tokens"),
        (570, "amber", "thick", "data plane: KV blocks, never by gRPC or Ray's object store"),
    ):
        d.arrow([(x, y), (x + 34, y)], ink, kind)
        d.text(x + 42, y + 4, words, "small")
    return d


def life() -> Drawing:
    d = Drawing(
        940,
        470,
        "The life of a request in six steps",
        "1 prefill computes the prompt; 2 its KV is offloaded to the pool in host memory; 3 the scheduler forms a "
        "batch of similar lengths; 4 the batch is prefetched into a buffer on a prefill device; 5 it is handed over "
        "to the decode device when there is room; 6 the longest request is evicted when memory runs out.",
    )
    d.frame(24, 20, 270, 240, "prefill device")
    d.box(48, 62, 222, 44, ["prefill", "chunks of several prompts"], "blue")
    d.box(48, 140, 222, 40, ["candidate batch buffer"], "amber")
    d.box(48, 200, 222, 40, ["candidate request buffer"], "amber")
    d.frame(646, 20, 270, 240, "decode device")
    d.box(670, 62, 222, 60, ["running batch", "similar prefix lengths"], "green")
    d.box(670, 150, 222, 90, ["iteration scheduler", "joins and evictions", "at every iteration boundary"])
    d.frame(24, 310, 892, 140, "host memory", (776, 23))
    d.box(
        48,
        348,
        340,
        80,
        ["KV pool", "the KV of every waiting request,", "and copies of running requests while there is room"],
        "amber",
    )
    d.box(
        480,
        348,
        412,
        80,
        [
            "scheduler: quad-tree of prefix lengths",
            "the densest range within K blocks with N requests",
            "is the next candidate batch",
        ],
        "blue",
    )
    d.arrow([(36, 84), (36, 328), (70, 328), (70, 348)], "amber", "thick")
    d.line(36, 84, 48, 84, "line amber thick")
    d.arrow([(388, 388), (480, 388)], both=True)
    d.arrow([(330, 348), (330, 170), (270, 170)], "amber", "thick")
    d.arrow([(330, 221), (270, 221)], "amber", "thick")
    d.arrow([(270, 150), (430, 150), (430, 84), (670, 84)], "amber", "thick")
    d.line(270, 207, 430, 207, "line amber thick")
    d.line(430, 208.5, 430, 150, "line amber thick")
    d.arrow([(670, 110), (520, 110), (520, 234), (270, 234)], "red", "thick")
    d.arrow([(520, 234), (520, 284), (370, 284), (370, 348)], "red", "dashed")
    for number, x, y in ((1, 48, 62), (2, 36, 282), (3, 434, 388), (4, 330, 280), (5, 430, 118), (6, 520, 170)):
        d.badge(x, y, number)
    d.text(538, 166, "evict the", "small")
    d.text(538, 182, "longest, to", "small")
    d.text(538, 198, "the buffer", "small")
    d.text(538, 214, "or the pool", "small")
    d.text(446, 76, "hand over, beside iterations", "small")
    d.text(52, 286, "offload", "small")
    d.text(264, 300, "prefetch", "small")
    return d


def kv() -> Drawing:
    d = Drawing(
        940,
        480,
        "Where KV is and how it moves, within a node and between nodes",
        "Each node has a shard of the pool. A worker writes only to the shard of its own node, and reads from any. "
        "Within a node blocks move by shared memory, asynchronous copies and CUDA IPC; between nodes by NCCL or Gloo.",
    )
    for x, name, shard in ((24, "node A", "pool shard kv_pool-0"), (500, "node B", "pool shard kv_pool-1")):
        d.frame(x, 20, 416, 360, name, (14, 346))
        d.box(x + 24, 66, 150, 90, ["prefill", "cache, and the two", "candidate buffers"], "blue")
        d.box(x + 242, 66, 150, 90, ["decode", "cache"], "green")
        d.box(x + 90, 270, 236, 70, [shard, "host memory, page-locked", "where there are GPUs"], "amber")
        d.arrow([(x + 174, 100), (x + 242, 100)], "amber", "thick")
        d.text(x + 208, 88, "hand-over", "small", "middle")
        d.arrow([(x + 120, 156), (x + 120, 270)], "amber", "thick", both=True)
        d.arrow([(x + 296, 156), (x + 296, 270)], "amber", "thick", both=True)
        d.text(x + 130, 206, "offload,", "small")
        d.text(x + 130, 222, "prefetch", "small")
        d.text(x + 288, 206, "evict,", "small", "end")
        d.text(x + 288, 222, "join", "small", "end")
    d.arrow([(590, 305), (470, 305), (470, 250), (384, 250), (384, 156)], "red", "thick")
    d.text(510, 290, "read from", "small")
    d.text(510, 322, "another", "small")
    d.text(510, 338, "shard: Gloo", "small")
    d.arrow([(198, 126), (218, 126), (218, 176), (470, 176), (470, 40), (800, 40), (800, 66)], "red", "dashed")
    d.text(524, 36, "a pair that is not on one node: NCCL or Gloo", "small")
    for x, ink, kind, words in (
        (40, "amber", "thick", "within a node: shared memory, asynchronous copies, CUDA IPC"),
        (480, "red", "thick", "between nodes: both ends take part; no process maps another node's memory"),
    ):
        d.arrow([(x, 415), (x + 34, 415)], ink, kind)
        d.text(x + 42, 419, words, "small")
    d.text(40, 452, "A worker writes only to the shard of its own node, and reads from any.", "bold")
    return d


def tree() -> Drawing:
    d = Drawing(
        940,
        430,
        "The quad-tree of prefix lengths and the densest range",
        "Waiting requests lie on an axis of prefix lengths. Each node of the tree stands for a range of lengths, "
        "keeps the number of its requests and blocks, and has four children. The search goes down to the child with "
        "the most requests until a node's blocks fit the limit K; with at least N requests it is the candidate batch.",
    )
    left, width = 40, 860
    d.box(left, 20, width, 30, ["all lengths: 29 requests, too many blocks"], "plain")
    second = [(0, "6"), (1, "16: too many blocks"), (2, "4"), (3, "3")]
    for number, words in second:
        kind = "blue" if number == 1 else "plain"
        d.box(left + number * width / 4 + 3, 80, width / 4 - 6, 30, [words], kind)
        d.line(left + width / 2, 50, left + (number + 0.5) * width / 4, 80)
    quarter = left + width / 4
    third = [(0, "2"), (1, "9"), (2, "4"), (3, "1")]
    for number, words in third:
        kind = "green" if number == 1 else "plain"
        d.box(quarter + number * width / 16 + 3, 140, width / 16 - 6, 30, [words], kind)
        d.line(quarter + width / 8, 110, quarter + (number + 0.5) * width / 16, 140)
    d.text(quarter + width / 4 + 20, 150, "9 requests, fits K and reaches N: the candidate batch.", "bold")
    d.text(quarter + width / 4 + 20, 168, "With too few, siblings are added until there are N.", "small")
    axis = 330
    d.arrow([(left, axis), (left + width + 20, axis)])
    d.text(left + width + 20, axis + 38, "prefix length in tokens", "small", "end")
    start, end = quarter + width / 16, quarter + width / 8
    d.box(start, 200, end - start, axis - 200, [], "green")
    dots = [
        0.02,
        0.05,
        0.09,
        0.13,
        0.18,
        0.23,
        0.262,
        0.30,
        *(0.317 + 0.0063 * i for i in range(9)),
        0.385,
        0.40,
        0.415,
    ]
    dots += [0.43, 0.46, 0.54, 0.61, 0.66, 0.72, 0.80, 0.88, 0.95]
    for number, share in enumerate(dots):
        d.dot(left + share * width, axis - 14 - 13 * (number * 7 % 8), 4.5, "amber")
    for number, words in enumerate(("1", "16384", "32768", "49152", "65536")):
        x = left + number * width / 4
        d.line(x, axis - 4, x, axis + 4)
        d.text(x, axis + 20, words, "small", "middle")
    d.text(
        left,
        380,
        "Each dot is a request whose KV is in the pool. Requests of one batch need nearly the same time for attention,",
        "",
    )
    d.text(left, 400, "so short ones wait less for long ones.", "")
    return d


def switch() -> Drawing:
    d = Drawing(
        940,
        420,
        "A batch switch",
        "Requests of the old batch end one after the other. At each iteration boundary with room requests of the next"
        " batch, which lies prefetched in the candidate batch buffer, are copied over beside the running iterations "
        "and join at the next boundary. The switch is over when the last request of the old batch has ended or was "
        "evicted.",
    )
    left, step, rows = 150, 48, 7
    for number in range(17):
        d.line(
            left + number * step,
            40,
            left + number * step,
            330,
            "line ink thin dashed" if number % 4 else "line ink thin",
        )
    d.text(left, 28, "iteration boundaries", "small")
    old = [3, 5, 6, 7, 8, 9, 10]
    for row in range(rows):
        y = 50 + row * 40
        d.box(left, y, old[row] * step - 3, 26, [], "blue")
        copy = old[row] * step
        if row == rows - 1:
            d.text(left + copy + 6, y + 17, "evicted: the longest of the old batch", "small")
            continue
        d.box(left + copy, y, step - 3, 26, [], "amber")
        d.box(left + copy + step, y, (16 - old[row] - 1) * step, 26, [], "green")
    d.text(left - 12, 67, "a slot of", "small", "end")
    d.text(left - 12, 82, "the batch", "small", "end")
    begin, end = left + 4 * step, left + 10 * step
    d.arrow([(begin, 345), (end, 345)], "ink", "", both=True)
    d.text((begin + end) / 2, 362, "batch switch: iterations with requests of two batches", "small", "middle")
    for x, kind, words in (
        (150, "blue", "old batch decodes"),
        (330, "amber", "copy of KV, beside iterations"),
        (580, "green", "next batch decodes"),
    ):
        d.box(x, 384, 26, 16, [], kind)
        d.text(x + 34, 397, words, "small")
    return d


def bubble() -> Drawing:
    d = Drawing(
        940,
        250,
        "What unequal lengths cost an iteration",
        "Two iterations with the same number of tokens of KV. With unequal lengths the longest request decides when "
        "the iteration ends; with similar lengths all end at about the same time.",
    )
    for x, words, lengths in (
        (40, "unequal lengths", (80, 110, 95, 360, 120, 75)),
        (500, "similar lengths", (140, 136, 144, 138, 142, 140)),
    ):
        d.text(x, 30, words, "large")
        longest = max(lengths)
        for row, length in enumerate(lengths):
            y = 46 + 26 * row
            d.box(x, y, length, 18, [], "red" if length == 360 else "green")
        d.line(x + longest, 38, x + longest, 206)
        d.text(x + longest + 6, 120 if longest < 300 else 70, "the iteration ends", "small")
        d.arrow([(x, 214), (x + longest, 214)], "ink", "", both=True)
    d.text(
        40,
        240,
        "Each bar is one request's attention; both read as many tokens. The gap after short bars is the bubble.",
        "small",
    )
    return d


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "processes": processes,
    "life-of-a-request": life,
    "kv": kv,
    "quad-tree": tree,
    "batch-switch": switch,
    "bubble": bubble,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
