"""The panels of the dashboard by row: their queries, units, and what their values mean.

A query names metrics without the cluster that they are of: `dashboard` adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignedserve.cluster.monitoring.outcomes import FAILED

PER_SECOND = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    """A query in PromQL. `legend` names its series, with labels as `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of one or more queries. `width` is in 24ths of the dashboard; `highest` is the end of its axis."""

    title: str
    meaning: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    stacked: bool = False
    figure: bool = False  # the last value as a number, instead of a plot
    highest: float | None = None


def per_second(metric: str, by: str = "", legend: str = "", where: str = "") -> Query:
    """The rate of a counter, summed by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    shown = legend or " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Query(f"{grouped} (rate({metric}{where}{PER_SECOND}))", shown)


def quantiles(metric: str, shares: Iterable[float], where: str = "") -> list[Query]:
    """Quantiles of a histogram over all its series."""
    return [
        Query(
            f"histogram_quantile({share:g}, sum by (le) (rate({metric}_bucket{where}{PER_SECOND})))",
            f"P{share * 100:g}",
        )
        for share in shares
    ]


def ratio(above: str, below: str, by: str, legend: str, where: str = "") -> Query:
    """The quotient of two counters' rates."""
    parts = [f"sum by ({by}) (rate({metric}{where}{PER_SECOND}))" for metric in (above, below)]
    return Query(" / ".join(parts), legend)


def missing_share(part: str, whole: str, by: str, legend: str, where: str = "") -> Query:
    """What one counter's rate lacks of another's, as a share of the other."""
    return Query(f"1 - {ratio(part, whole, by, legend, where).expr}", legend)


DECODE = '{instance=~"$decode"}'
PREFILL = '{instance=~"$prefill"}'
SHARD = '{store=~"kv_pool-[0-9]+"}'
PREDICTED_S = "alignedserve_iteration_predicted_seconds_total"
BALANCED_S = "alignedserve_iteration_balanced_seconds_total"
BYTES, BUSY_S = "alignedserve_transfer_bytes_total", "alignedserve_transfer_busy_seconds_total"
EXPOSED_S = "alignedserve_prefill_offload_exposed_seconds_total"
ITERATIONS = "alignedserve_decode_iterations_total"

OVERVIEW = (
    Panel(
        "Requests ended",
        "Answers and failed calls that ended in a second, of all gateways.",
        [per_second("alignedserve_gateway_requests_total", legend="requests")],
        unit="reqps",
        width=4,
        figure=True,
    ),
    Panel(
        "Tokens",
        "Tokens that gateways received from decode instances in a second.",
        [per_second("alignedserve_gateway_output_tokens_total", legend="tokens")],
        unit="suffix: /s",
        width=4,
        figure=True,
    ),
    Panel(
        "TTFT, P99",
        "Time to first token: 99 % of requests waited less from their arrival at a gateway.",
        quantiles("alignedserve_gateway_ttft_seconds", [0.99]),
        unit="s",
        width=4,
        figure=True,
    ),
    Panel(
        "Between tokens, P99",
        "99 % of the times between two tokens of an answer were shorter.",
        quantiles("alignedserve_gateway_itl_seconds", [0.99]),
        unit="s",
        width=4,
        figure=True,
    ),
    Panel(
        "Bubble",
        "Share of decode time that unequal prefix lengths cost: predicted by the cost model; without one, as learned.",
        [
            Query(
                f"1 - sum (rate({BALANCED_S}{PER_SECOND})) / sum (rate({PREDICTED_S}{PER_SECOND}))"
                " or avg (alignedserve_decode_unequal_lengths_share >= 0)",
                "bubble",
            )
        ],
        unit="percentunit",
        width=4,
        figure=True,
    ),
    Panel(
        "Failed",
        "Share of ended requests that failed by the cluster's fault. Cancelled and refused requests do not count.",
        [
            Query(
                f"(sum (rate(alignedserve_gateway_requests_total{FAILED}{PER_SECOND})) or vector(0))"
                f" / sum (rate(alignedserve_gateway_requests_total{PER_SECOND}))",
                "failed",
            )
        ],
        unit="percentunit",
        width=4,
        figure=True,
    ),
    Panel(
        "Requests ended, by outcome",
        "`stop` and `length` are complete answers; anything else is an error code.",
        [Query(f"sum by (outcome) (rate(alignedserve_gateway_requests_total{PER_SECOND})) > 0", "{{outcome}}")],
        unit="reqps",
        stacked=True,
    ),
    Panel(
        "Where requests are",
        "Queued: before prefill. In the pool: their KV waits for a batch. Prefetched: in the candidate buffers of a"
        " prefill instance, or on the way there.",
        [
            Query(f"sum (alignedserve_requests_{state})", legend)
            for state, legend in (
                ("queued", "queued"),
                ("prefilling", "prefilling"),
                ("waiting_in_pool", "in the pool"),
                ("prefetched", "prefetched"),
                ("decoding", "decoding"),
            )
        ],
        stacked=True,
    ),
    Panel(
        "Tokens per second",
        "Tokens of submitted prompts, and tokens of answers.",
        [
            per_second("alignedserve_gateway_prompt_tokens_total", legend="prompts"),
            per_second("alignedserve_gateway_output_tokens_total", legend="answers"),
        ],
    ),
    Panel(
        "Time to first token",
        "From the arrival at a gateway to the first token, which prefill samples: queue and prefill.",
        quantiles("alignedserve_gateway_ttft_seconds", [0.5, 0.9, 0.99]),
        unit="s",
    ),
    Panel(
        "Time between tokens",
        "Between two tokens of an answer. The wait in the pool lies between the first two; high values beside a low"
        " median are such waits, and evictions.",
        quantiles("alignedserve_gateway_itl_seconds", [0.5, 0.9, 0.99]),
        unit="s",
    ),
    Panel(
        "Time of a request",
        "From the arrival to the last token.",
        quantiles("alignedserve_gateway_request_seconds", [0.5, 0.9, 0.99]),
        unit="s",
    ),
    Panel(
        "Predicted for a request that arrives now",
        "TTFT and time per output token that the scheduler predicts. Requests are refused by these if there are"
        " objectives.",
        [
            Query("max (alignedserve_predicted_ttft_seconds)", "TTFT"),
            Query("max (alignedserve_predicted_tpot_seconds)", "per output token"),
        ],
        unit="s",
    ),
    Panel(
        "Ready instances",
        "Processes that serve, by role. 0 of a role means that the cluster cannot answer.",
        [Query("max by (role) (alignedserve_ready_instances)", "{{role}}")],
    ),
    Panel(
        "Lines of batches",
        "Lines of offline batches: answered in a second by outcome, and in flight now.",
        [
            per_second("alignedserve_gateway_batch_lines_total", "outcome"),
            Query("sum (alignedserve_gateway_batch_lines_in_flight)", "in flight"),
        ],
    ),
)

ALIGNMENT = (
    Panel(
        "Bubble by decode instance",
        "Share of an instance's decode time that unequal lengths cost. `learned` is without a cost model, once there"
        " are enough iterations.",
        [
            missing_share(BALANCED_S, PREDICTED_S, "instance", "{{instance}}", DECODE),
            Query('alignedserve_decode_unequal_lengths_share{decode=~"$decode"} >= 0', "{{decode}}, learned"),
        ],
        unit="percentunit",
    ),
    Panel(
        "Prefix lengths in the running batch",
        "Shortest and longest prefix, in tokens. The closer they are, the better the batch is aligned.",
        [
            Query(f"alignedserve_decode_shortest_tokens{DECODE}", "{{instance}} shortest"),
            Query(f"alignedserve_decode_longest_tokens{DECODE}", "{{instance}} longest"),
        ],
    ),
    Panel(
        "Requests in the running batch",
        "`most` is what an instance takes. It falls while the TPOT objective keeps candidates from joining.",
        [
            Query(f"alignedserve_decode_running{DECODE}", "{{instance}}"),
            Query(f"alignedserve_decode_max_running{DECODE}", "{{instance}} most"),
        ],
    ),
    Panel(
        "Time of an iteration",
        "Measured; predicted by the cost model; and predicted for the same bytes at equal lengths. The last two differ"
        " by the bubble.",
        [
            ratio("alignedserve_decode_seconds_total", ITERATIONS, "instance", "{{instance}} measured", DECODE),
            ratio(PREDICTED_S, ITERATIONS, "instance", "{{instance}} predicted", DECODE),
            ratio(BALANCED_S, ITERATIONS, "instance", "{{instance}} equal lengths", DECODE),
        ],
        unit="s",
    ),
    Panel(
        "Batch switches and holds",
        "Shares of iterations with requests of two batches, and of those that a candidate did not join to keep the TPOT"
        " objective.",
        [
            ratio("alignedserve_decode_switch_iterations_total", ITERATIONS, "instance", "{{instance}} switch", DECODE),
            ratio("alignedserve_decode_held_iterations_total", ITERATIONS, "instance", "{{instance}} held", DECODE),
        ],
        unit="percentunit",
    ),
    Panel(
        "Gap between iterations",
        "From the last token of an iteration to the launch of the next: what the device idles, as far as the host can"
        " tell.",
        quantiles("alignedserve_iteration_gap_seconds", [0.5, 0.99], DECODE),
        unit="s",
    ),
    Panel(
        "Late requests",
        "Share of recent requests that began to decode past their wait objective, and the share of the objective after"
        " which a request is overdue.",
        [
            Query("max (alignedserve_late_requests_share)", "late"),
            Query("max (alignedserve_starvation_threshold_share)", "overdue after"),
        ],
        unit="percentunit",
    ),
    Panel(
        "Order of batches",
        "1: batches go to the instance in order of arrival. 0: by another order, which gathers similar lengths.",
        [Query('alignedserve_decode_in_order_of_arrival{decode=~"$decode"}', "{{decode}}")],
        highest=1,
    ),
    Panel(
        "Evictions and bypasses",
        "Requests evicted from a running batch, and requests that an instance copied from the pool past the candidate"
        " buffers.",
        [
            per_second("alignedserve_decode_evictions_total", "instance", "{{instance}} evicted", DECODE),
            per_second("alignedserve_requests_bypassed_prefetch_total", legend="bypassed prefetch"),
        ],
        unit="reqps",
    ),
    Panel(
        "CUDA graphs",
        "On a GPU: iterations computed from a graph and without one, and padding rows beside those of the batches.",
        [
            per_second("alignedserve_decode_graph_replays_total", "instance", "{{instance}} graph", DECODE),
            per_second("alignedserve_decode_eager_iterations_total", "instance", "{{instance}} eager", DECODE),
            per_second("alignedserve_decode_graph_padded_rows_total", "instance", "{{instance}} padding rows", DECODE),
        ],
        unit="ops",
    ),
    Panel(
        "Ranks wait",
        "Of instances of several ranks, seconds in a second: each rank waits for others; all wait for the last"
        " attention or experts of a layer; a pipeline's stage idles, as predicted.",
        [
            per_second("alignedserve_rank_waited_seconds_total", "instance, rank", "{{instance}} rank {{rank}}"),
            per_second(
                "alignedserve_rank_barrier_idle_seconds_total",
                "instance, waits_for",
                "{{instance}} all for {{waits_for}}",
            ),
            per_second("alignedserve_lanes_idle_predicted_seconds_total", "instance", "{{instance}} stage"),
        ],
    ),
)

KV_AND_TRANSFERS = (
    Panel(
        "Pool",
        "Blocks of all shards. Cached blocks can be taken back, so only owned ones are in use.",
        [Query(f"sum by (state) (alignedserve_kv_blocks{SHARD})", "{{state}}")],
        stacked=True,
    ),
    Panel(
        "Room by store",
        "Share of blocks that are free or can be taken back, of each shard, disk tier, cache and candidate buffer.",
        [
            Query(
                'sum by (store) (alignedserve_kv_blocks{state=~"free|cached"})'
                " / sum by (store) (alignedserve_kv_capacity_blocks)",
                "{{store}}",
            )
        ],
        unit="percentunit",
        highest=1,
    ),
    Panel(
        "Requests and blocks of the pool",
        "Requests whose KV the pool holds; blocks leased to writers and not committed; blocks of pinned prefixes.",
        [
            Query("sum (alignedserve_pool_requests)", "requests"),
            Query("sum (alignedserve_pool_leased_blocks)", "leased blocks"),
            Query("sum (alignedserve_pool_pinned_blocks)", "pinned blocks"),
        ],
    ),
    Panel(
        "Prefix cache hits",
        "Share of prompts' tokens whose KV the prefix cache had, by where it was.",
        [
            Query(
                f"sum by (tier) (rate(alignedserve_prefix_cache_hit_tokens_total{PER_SECOND}))"
                f" / on () group_left () sum (rate(alignedserve_prefix_cache_queried_tokens_total{PER_SECOND}))",
                "{{tier}}",
            )
        ],
        unit="percentunit",
        stacked=True,
        highest=1,
    ),
    Panel(
        "Prefill",
        "Seconds of passes in a second: 1 is an instance that always computes. Pending: prompt tokens to compute.",
        [
            per_second("alignedserve_prefill_seconds_total", "instance", "{{instance}} busy", PREFILL),
            Query(f"alignedserve_prefill_pending_tokens{PREFILL}", "{{instance}} pending tokens"),
        ],
    ),
    Panel(
        "Prompts' KV to the pool",
        "Blocks written to the pool; those of copies begun before the prompt was computed; seconds of copies after it.",
        [
            per_second("alignedserve_prefill_offload_blocks_total", "instance", "{{instance}} blocks", PREFILL),
            per_second("alignedserve_prefill_offload_ahead_blocks_total", "instance", "{{instance}} ahead", PREFILL),
            per_second(EXPOSED_S, "instance", "{{instance}} exposed seconds", PREFILL),
        ],
    ),
    Panel(
        "Bytes copied, by channel",
        "Bytes that channels copied in a second.",
        [per_second(BYTES, "channel")],
        unit="Bps",
        stacked=True,
    ),
    Panel(
        "Bytes copied, by route",
        "From which store to which.",
        [per_second(BYTES, "source, destination", "{{source}} → {{destination}}")],
        unit="Bps",
    ),
    Panel(
        "Bandwidth while copying",
        "Bytes over the seconds in which the channel copied. Compare it with `alignedserve doctor`.",
        [ratio(BYTES, BUSY_S, "channel", "{{channel}}")],
        unit="Bps",
    ),
    Panel(
        "Disk tier",
        "Bytes of blocks read from and written to the disk tier in a second.",
        [
            per_second("alignedserve_disk_tier_read_bytes_total", legend="read"),
            per_second("alignedserve_disk_tier_written_bytes_total", legend="written"),
        ],
        unit="Bps",
    ),
    Panel(
        "Page-locked memory",
        "On a GPU: memory that is page-locked so far, and what will be.",
        [
            Query("sum by (store) (alignedserve_page_locked_bytes)", "{{store}}"),
            Query("sum by (store) (alignedserve_page_lockable_bytes)", "{{store}} in the end"),
        ],
        unit="bytes",
    ),
    Panel(
        "Grammars",
        "Grammars of structured output: compiled, found compiled, and refused in a second.",
        [
            per_second("alignedserve_grammar_compile_seconds_count", legend="compiled"),
            per_second("alignedserve_grammar_cache_hits_total", legend="found"),
            per_second("alignedserve_grammar_refused_total", legend="refused"),
        ],
        unit="ops",
    ),
)

FAILURES = (
    Panel(
        "Firing alerts",
        "Alerts of this dashboard's rules that fire now. docs/operations/runbooks.md says what to do.",
        [Query('sum by (alertname) (ALERTS{alertstate="firing", component="alignedserve"})', "{{alertname}}")],
        stacked=True,
    ),
    Panel(
        "Processes started",
        "Processes that the supervisor started in five minutes. After the cluster's start, each is a replacement.",
        [Query("sum (increase(alignedserve_role_starts_total[5m]))", "starts")],
    ),
    Panel(
        "Work repeated after losses",
        "Requests submitted again; prompt tokens computed again, and tokens whose KV the pool still had.",
        [
            per_second("alignedserve_gateway_resubmissions_total", legend="resubmissions"),
            per_second("alignedserve_prefill_repeated_tokens_total", legend="tokens computed again"),
            per_second("alignedserve_prefill_reused_tokens_total", legend="tokens adopted"),
        ],
    ),
    Panel(
        "Copies and checksums",
        "Copies that failed over a channel, copies that failed on every route, and blocks that differed after a copy.",
        [
            per_second("alignedserve_transfer_failed_total", "channel", "{{channel}} failed"),
            per_second("alignedserve_kv_copy_failures_total", legend="failed on every route"),
            per_second("alignedserve_kv_checksum_mismatches_total", legend="checksum mismatches"),
        ],
        unit="ops",
    ),
    Panel(
        "Refused and dropped",
        "Requests refused for load. Dropped: their KV gave way as a last resort, and they are prefilled again.",
        [
            per_second("alignedserve_requests_refused_for_load_total", legend="refused"),
            per_second("alignedserve_requests_dropped_for_room_total", legend="dropped for room"),
        ],
        unit="reqps",
    ),
    Panel(
        "Faults of the disk tier",
        "Errors, wrong blocks and time-outs; each has cost cached blocks only. Declined reads would have taken longer"
        " than computing. On: 1 while the direction is in use.",
        [
            per_second("alignedserve_disk_tier_faults_total", "doing", "{{doing}} faults"),
            per_second("alignedserve_disk_tier_declined_total", legend="declined reads"),
            Query("min by (doing) (alignedserve_disk_tier_on)", "{{doing}} on"),
        ],
    ),
    Panel(
        "Late events and unlogged requests",
        "Token events of requests that had ended; requests without a line in the request log.",
        [
            per_second("alignedserve_gateway_stale_events_total", legend="late events"),
            per_second("alignedserve_gateway_unlogged_requests_total", legend="unlogged"),
        ],
        unit="ops",
    ),
    Panel(
        "Batches ended",
        "Offline batches ended in five minutes, by their last status.",
        [Query("sum by (status) (increase(alignedserve_gateway_batches_total[5m]))", "{{status}}")],
        stacked=True,
    ),
)

ROWS: Mapping[str, Sequence[Panel]] = {
    "Overview": OVERVIEW,
    "Alignment": ALIGNMENT,
    "KV and transfers": KV_AND_TRANSFERS,
    "Failures": FAILURES,
}
