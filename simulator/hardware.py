"""The simulated machine: its KV stores and links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Hardware of one cell. Tokens, bytes, bytes a second, seconds.

    Rates are for each direction of one instance's link. `kv_tokens`: cache of a decode (or colocated) instance; a
    prefill instance's own cache and its two candidate buffers are shares of as much memory. `prefill_...`: of prefill
    instances, if they have other devices; 0: as decode instances. `message_s`: one control message. `host_overhead_s`:
    added by an engine to every pass. `collective_bandwidth`: of one device's link in the collectives of tensor
    parallelism, and in the exchange of tokens between ranks that share experts.

    Slowdowns: by what factor a pass takes longer in a cluster than in the cost model, because processes share a
    machine's cores and caches. `..._beside`: for a pass that begins while its neighbour of the other role computes.
    Neighbours are the prefill and the decode instance of the same number. Passes of a single colocated instance have
    `decode_slowdown`; of several, `decode_slowdown_beside`, because two then share a machine.

    `nodes`: machines, each with a shard of `pool_tokens` and its own prefix cache; instance i is on node i modulo
    `nodes`. `network_bandwidth`: of one node's link to the others, each direction. `disk_tokens`: room for KV on each
    node's disk; 0: it is not used.
    """

    kv_tokens: int
    kv_bytes_per_token: int
    pool_tokens: int
    block_size: int = 16
    batch_buffer_share: float = 0.4
    requests_buffer_share: float = 0.1
    pool_bandwidth: float = 25e9
    peer_bandwidth: float = 150e9
    prefill_kv_tokens: int = 0
    prefill_pool_bandwidth: float = 0.0
    prefill_peer_bandwidth: float = 0.0
    copy_latency_s: float = 20e-6
    nodes: int = 1
    network_bandwidth: float = 25e9
    disk_tokens: int = 0
    disk_bandwidth: float = 5e9
    disk_latency_s: float = 100e-6
    collective_bandwidth: float = 50e9
    collective_latency_s: float = 20e-6
    message_s: float = 200e-6
    host_overhead_s: float = 0.0
    prefill_slowdown: float = 1.0
    prefill_slowdown_beside: float = 1.0
    decode_slowdown: float = 1.0
    decode_slowdown_beside: float = 1.0
