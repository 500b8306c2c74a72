"""The simulated machine: what holds KV, and what moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Of one cell. Tokens, bytes, bytes a second, seconds. Rates are of each direction of one instance's link.

    `kv_tokens`: cache of a decode (or colocated) instance; a prefill instance's own cache and its two candidate
    buffers are shares of the same memory. `message_s`: one control message. `host_overhead_s`: what an engine
    adds to every pass.

    Slowdowns: how many times as long a pass takes in a cluster as the cost model says, because processes share a
    machine's cores and caches; `..._beside`: one that begins while its neighbour of the other role computes. Neighbours
    are the prefill and the decode instance of the same number. Passes of a colocated instance have `decode_slowdown`
    where there is one, and `decode_slowdown_beside` where there are several: two share a machine then.
    """

    kv_tokens: int
    kv_bytes_per_token: int
    pool_tokens: int
    block_size: int = 16
    batch_buffer_share: float = 0.4
    requests_buffer_share: float = 0.1
    pool_bandwidth: float = 25e9
    peer_bandwidth: float = 150e9
    copy_latency_s: float = 20e-6
    message_s: float = 200e-6
    host_overhead_s: float = 0.0
    prefill_slowdown: float = 1.0
    prefill_slowdown_beside: float = 1.0
    decode_slowdown: float = 1.0
    decode_slowdown_beside: float = 1.0
