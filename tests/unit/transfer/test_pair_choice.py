"""Which channel serves a pair, and the error if the configured channel is unavailable."""

from __future__ import annotations

import pytest

from alignedserve.errors import ResourceError
from alignedserve.transfer.pair_choice import MULTI_RANK_VARIABLE, choose_pair_channel, require_packages
from alignedserve.transfer.topology import ChannelChoice, Place

HOST, FAR_HOST = Place("a"), Place("b")
GPU, OTHER_GPU, FAR_GPU = Place("a", "cuda:0"), Place("a", "cuda:1"), Place("b", "cuda:0")


def choose(
    wanted: str, ours: Place, theirs: Place, *, reach: bool = True, no_nccl: str = "", allow_slow: bool = False
) -> ChannelChoice:
    pair = ("decode-0", ours), ("prefill-0", theirs)
    return choose_pair_channel(wanted, *pair, lambda a, b: reach, no_nccl=no_nccl, allow_slow=allow_slow)


@pytest.mark.parametrize(
    ("ours", "theirs", "no_nccl", "name"),
    [
        (HOST, HOST, "", "shared-memory"),
        (GPU, GPU, "", "cuda-ipc"),
        (GPU, OTHER_GPU, "", "cuda-ipc"),
        (GPU, FAR_GPU, "", "nccl"),
        (GPU, FAR_GPU, "cupy is not installed", "gloo"),
        (HOST, FAR_HOST, "", "gloo"),
        (GPU, FAR_HOST, "", "gloo"),
    ],
)
def test_left_to_itself_it_follows_from_where_the_two_are(ours: Place, theirs: Place, no_nccl: str, name: str) -> None:
    choice = choose("auto", ours, theirs, no_nccl=no_nccl)
    assert (choice.name, choice.slow) == (name, False)
    assert no_nccl in choice.reason


def test_devices_apart_are_refused_with_what_to_do_unless_the_slow_way_is_allowed() -> None:
    with pytest.raises(ResourceError, match=r"cannot access each other's memory.*channel: nccl.*allow_slow_channel"):
        choose("auto", GPU, OTHER_GPU, reach=False)
    assert choose("auto", GPU, OTHER_GPU, reach=False, allow_slow=True).name == "cuda-staged"
    assert choose("nccl", GPU, OTHER_GPU, reach=False).name == "nccl"


@pytest.mark.parametrize(
    ("wanted", "ours", "theirs", "reach", "why", "next_best"),
    [
        ("shared-memory", HOST, FAR_HOST, True, r"on different nodes \(a, b\)", "gloo"),
        ("shared-memory", GPU, GPU, True, "in the memory of a GPU", "cuda-ipc"),
        ("cuda-ipc", HOST, HOST, True, "KV is in host memory", "shared-memory"),
        ("cuda-ipc", GPU, FAR_GPU, True, "on different nodes", "nccl"),
        ("cuda-ipc", GPU, OTHER_GPU, False, "cannot access each other's memory", "cuda-staged"),
        ("nccl", HOST, HOST, True, "KV is in host memory", "shared-memory"),
        ("nccl", GPU, GPU, True, f"both are on cuda:0.*{MULTI_RANK_VARIABLE}=1", "cuda-ipc"),
    ],
)
def test_a_named_channel_is_had_or_refused_and_never_replaced_in_silence(
    monkeypatch: pytest.MonkeyPatch, wanted: str, ours: Place, theirs: Place, reach: bool, why: str, next_best: str
) -> None:
    monkeypatch.delenv(MULTI_RANK_VARIABLE, raising=False)
    with pytest.raises(ResourceError, match=rf"'{wanted}', which decode-0 .* and prefill-0 .*{why}.*allow_slow"):
        choose(wanted, ours, theirs, reach=reach)
    choice = choose(wanted, ours, theirs, reach=reach, allow_slow=True)
    assert (choice.name, choice.slow) == (next_best, True)
    assert f"cluster.channel is '{wanted}'" in choice.reason


def test_nixl_is_had_by_name_only_and_by_any_two() -> None:
    for ours, theirs in ((HOST, HOST), (GPU, FAR_GPU), (GPU, FAR_HOST)):
        assert choose("nixl", ours, theirs).name == "nixl"


def test_two_ranks_on_one_gpu_are_had_where_nccl_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MULTI_RANK_VARIABLE, "1")
    assert choose("nccl", GPU, GPU).name == "nccl"
    assert choose("gloo", GPU, GPU).name == "gloo"


def test_a_worker_without_the_packages_says_so_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"cluster\.channel is 'nccl', but cupy is not installed"):
        require_packages("nccl", "cupy is not installed: pip install it", allow_slow=False)
    require_packages("nccl", "cupy is not installed", allow_slow=True)
    require_packages("auto", "cupy is not installed", allow_slow=False)
    require_packages("nixl", "cupy is not installed", allow_slow=False)
    monkeypatch.setattr("alignedserve.transfer.pair_choice.NIXL_PACKAGES", ("no_such_package",))
    with pytest.raises(ResourceError, match=r"cluster\.channel is 'nixl', but NIXL is not installed: pip install"):
        require_packages("nixl", "", allow_slow=True)
