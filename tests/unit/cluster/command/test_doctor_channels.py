"""What `alignedserve doctor` reports about channels: planned, measured, and those of a running cluster."""

from __future__ import annotations

import pytest

from alignedserve.cluster.cli import doctor_channels
from alignedserve.cluster.cli.doctor_channels import examine_channels
from alignedserve.cluster.cli.live_command import busy_channels
from alignedserve.cluster.launch.preflight import check_channel
from alignedserve.config_sources import from_tree
from alignedserve.errors import ConfigError, ResourceError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.transfer.paired.measure import measure_channel

SMALL = KvGeometry("doctor", "float16", layers=2, kv_heads=2, head_dim=8, block_size=4)


@pytest.mark.parametrize("channel", ["shared-memory", "gloo"])
def test_a_channel_between_two_processes_is_measured_both_ways(channel: str) -> None:
    found = measure_channel(channel, "cpu", "cpu", geometry=SMALL, blocks=64)
    assert found.to_ours > 0
    assert found.from_ours > 0


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_channels, "_measure", lambda channel, ours, theirs, problems: ("1", "2"))


def test_each_pair_has_the_channel_that_is_configured_and_the_pool_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    config = from_tree({"cluster": {"device": "cpu", "channel": "gloo", "decode": 2}})
    _, rows, problems = examine_channels(config)
    found = {(row["source"], row["destination"]): (row["channel"], row["GB/s"], row["GB/s back"]) for row in rows}
    assert found == {
        ("prefill-0/cache", "kv_pool-0"): ("shared-memory", "2", "1"),  # the instance copies from its own store
        ("kv_pool-0", "prefill-0/buffers"): ("shared-memory", "1", "2"),
        ("prefill-0/buffers", "decode-0/cache"): ("gloo", "1", "2"),
        ("prefill-0/buffers", "decode-1/cache"): ("gloo", "1", "2"),
    }
    assert not problems
    _, rows, _ = examine_channels(from_tree({"cluster": {"device": "cpu"}, "decode": {"tensor_parallel": 2}}))
    (ranks,) = (row for row in rows if "rank" in row["source"])
    assert (ranks["source"], ranks["channel"], ranks["reason"]) == ("decode-0 rank 0", "gloo", "it has 2 ranks")


def test_a_channel_that_cannot_be_had_or_does_not_work_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TransferError("no such memory")

    monkeypatch.setattr("alignedserve.transfer.paired.measure.measure_channel", broken)
    _, rows, problems = examine_channels(from_tree({"cluster": {"device": "cpu", "channel": "nccl"}}))
    assert [row["channel"] for row in rows] == ["shared-memory", "shared-memory", "none"]
    assert problems[0] == "channel shared-memory between cpu and cpu does not work: no such memory"
    assert "cluster.channel is 'nccl'" in problems[1]
    assert "KV is in host memory" in problems[1]


def test_what_pairs_cannot_have_is_known_before_a_start() -> None:
    tree = {"device": "cpu", "channel": "nccl"}
    with pytest.raises(ResourceError, match="KV is in host memory"):
        check_channel(from_tree({"cluster": tree}))
    assert "channel is shared-memory" in check_channel(from_tree({"cluster": {**tree, "allow_slow_channel": True}}))
    for fine in ({**tree, "channel": "gloo"}, {**tree, "channel": "auto"}, {**tree, "prefetch": False}):
        assert check_channel(from_tree({"cluster": fine})) == ""


def test_a_driver_is_not_asked_before_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_channels, "count_gpus", lambda: 2)
    monkeypatch.setattr(doctor_channels, "cupy_missing", lambda: "no cupy")
    tree = {"device": "cuda", "channel": "cuda-ipc"}
    assert check_channel(from_tree({"cluster": tree})) == ""
    with pytest.raises(ResourceError, match="memory of a GPU"):
        check_channel(from_tree({"cluster": {**tree, "channel": "shared-memory"}}))
    with pytest.raises(ResourceError, match="no cupy"):
        check_channel(from_tree({"cluster": {**tree, "channel": "nccl"}}))


def test_a_configuration_for_several_nodes_shows_the_links_of_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(doctor_channels, "count_gpus", lambda: 8)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda source, destination: True)
    monkeypatch.setattr(doctor_channels, "_gpu_links", lambda: None)
    tree = {"device": "cuda", "prefill": 2, "decode": 2, "tensor_parallel": 4}
    roles, rows, problems = examine_channels(from_tree({"cluster": tree}))
    devices = {role["id"]: role["device"] for role in roles if role["device"] != "cpu"}
    assert devices == {"prefill-0": "cuda:0,1,2,3", "decode-0": "cuda:4,5,6,7"}
    assert sum("rank 0" in row["source"] for row in rows) == 6
    assert not problems
    assert examine_channels(from_tree({"cluster": {**tree, "tensor_parallel": 8}})) == ([], [], [])
    stages = {"cluster": {**tree, "tensor_parallel": 2}, "decode": {"pipeline_parallel": 2}}
    links = [(row["source"], row["destination"]) for row in examine_channels(from_tree(stages))[1]]
    assert [(of, to) for of, to in links if of.startswith("decode-0 rank")] == [
        ("decode-0 rank 0", "its rank 1 on cuda:3"),
        ("decode-0 rank 0", "its rank 2 on cuda:4"),
        ("decode-0 rank 2", "its rank 3 on cuda:5"),
    ]


@pytest.mark.parametrize("channel", ["nccl", "nixl"])
def test_a_channel_that_does_not_reach_ranks_on_gpus_is_known_before_a_start(
    channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_channels, "count_gpus", lambda: 4)
    tree = {"device": "cuda", "channel": channel, "tensor_parallel": 2}
    with pytest.raises(ConfigError, match=f"cluster.channel is '{channel}'.*use auto, gloo or cuda-ipc"):
        check_channel(from_tree({"cluster": tree}))


def test_a_running_clusters_channels_are_read_from_its_metrics() -> None:
    def lines(source: str, moved_bytes: float, busy_s: float) -> list[str]:
        labels = f'source="{source}",destination="decode-0/cache",channel="gloo",instance="decode-0"'
        values = {"copies": 3, "failed": 1, "bytes": moved_bytes, "busy_seconds": busy_s}
        return [f"alignedserve_transfer_{name}_total{{{labels}}} {value!r}" for name, value in values.items()]

    text = "\n".join([*lines("prefill-0/batch-7", 3e9, 1.5), *lines("prefill-0/requests-7", 0.0, 0.0)])
    busy, idle = busy_channels(text)
    assert busy == {
        "source": "prefill-0/batch-7",
        "destination": "decode-0/cache",
        "channel": "gloo",
        "copies": 3,
        "failed": 1,
        "bytes": 3_000_000_000,
        "seconds": 1.5,
        "GB/s": 2.0,
    }
    assert (idle["source"], idle["GB/s"]) == ("prefill-0/requests-7", "")
