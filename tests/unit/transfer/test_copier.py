"""Failing and corrupting copies: how the copier handles every kind of fault, with and without checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from alignedserve.errors import ChecksumError, ConfigError, TransferError
from alignedserve.geometry import KvGeometry
from alignedserve.transfer import links
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.channel import Channel
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.host_channel import HostChannel
from support.faulty_channel import PLAN_VARIABLE, FaultPlan, FaultyChannel, fault_environment

GEOMETRY = KvGeometry("random", "float32", 2, 2, 8, 4)
SOURCE_IDS = [3, 5, 4]
DESTINATION_IDS = [0, 7, 2]


class World:
    """Two stores of random bytes, channels with faults between them, and copiers."""

    def __init__(self) -> None:
        draw = np.random.default_rng(3)
        self.stores = [HostBlockStore.private(name, GEOMETRY, 8) for name in ("a", "b")]
        for store in self.stores:
            store.blocks[:] = draw.integers(0, 256, store.blocks.shape, np.uint8)
        self.opened: list[Channel | Copier] = []
        self.now_s = 0.0

    def channel(self, **faults: float) -> FaultyChannel:
        plan = FaultPlan(**faults)  # type: ignore[arg-type]
        channel = FaultyChannel(HostChannel(self.stores[0], self.stores[1]), plan)
        self.opened.append(channel)
        return channel

    def copier(self, *, verify: bool = True) -> Copier:
        copier = Copier(verify=verify, timeout_s=5.0, clock=lambda: self.now_s)
        self.opened.append(copier)
        return copier

    def route(self, channel: Channel, checksums: Sequence[int] | None = None) -> Route:
        known = self.stores[0].checksums(SOURCE_IDS) if checksums is None else checksums
        return Route(channel, SOURCE_IDS, known)

    def found_stuck(self, copier: Copier, *, until_s: float) -> TransferError | None:
        """Advance the time, and ask every second, as heartbeats do."""
        found = None
        while found is None and self.now_s < until_s:
            self.now_s += 1.0
            found = copier.stuck()
        return found

    def arrived(self) -> bool:
        wanted, found = self.stores[0].blocks[SOURCE_IDS], self.stores[1].blocks[DESTINATION_IDS]
        return bool((wanted == found).all())


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for opened in world.opened:
        opened.close()


def test_the_channel_does_what_its_plan_says(world: World) -> None:
    assert world.channel().copy(SOURCE_IDS, DESTINATION_IDS).wait(10)
    assert world.arrived()
    with pytest.raises(TransferError, match="refused"):
        world.channel(refuse=1.0).copy(SOURCE_IDS, DESTINATION_IDS)
    with pytest.raises(TransferError, match="injected"):
        world.channel(error=1.0).copy(SOURCE_IDS, DESTINATION_IDS).wait(10)


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_a_lie_goes_unnoticed_without_checksums(world: World, fault: str) -> None:
    channel = world.channel(**{fault: 1.0})
    copied = world.copier(verify=False).copy([world.route(channel, [])], DESTINATION_IDS, "r")
    assert copied.wait(10)
    assert not world.arrived()
    assert channel.injected == {fault: 1}


def test_a_flip_changes_one_bit(world: World) -> None:
    assert world.channel(flip=1.0).copy(SOURCE_IDS, DESTINATION_IDS).wait(10)
    changed = world.stores[0].blocks[SOURCE_IDS] ^ world.stores[1].blocks[DESTINATION_IDS]
    assert int(np.bitwise_count(changed).sum()) == 1


def test_a_short_copy_leaves_out_the_end(world: World) -> None:
    before = world.stores[1].blocks.copy()
    assert world.channel(short=1.0).copy(SOURCE_IDS, DESTINATION_IDS).wait(10)
    wanted, found = world.stores[0].blocks[SOURCE_IDS], world.stores[1].blocks[DESTINATION_IDS]
    half = GEOMETRY.block_bytes // 2
    assert (wanted[:2] == found[:2]).all()
    assert (wanted[2, :half] == found[2, :half]).all()
    assert (found[2, half:] == before[DESTINATION_IDS[2], half:]).all()


@pytest.mark.parametrize("fault", ["short", "flip"])
def test_with_checksums_a_lie_is_an_error_that_says_where(world: World, fault: str) -> None:
    copier = world.copier()
    copied = copier.copy([world.route(world.channel(**{fault: 1.0}))], DESTINATION_IDS, "request-1")
    with pytest.raises(ChecksumError, match=r"request-1: 1 of 3 blocks .* of b, copied from block \d of a") as raised:
        copied.wait(10)
    assert raised.value.details["block"] in DESTINATION_IDS
    assert (copier.mismatches, copier.checked_blocks, copier.failures) == (1, 3, 1)


@pytest.mark.parametrize("fault", ["refuse", "error", "short", "flip"])
def test_a_copy_that_fails_is_made_again_over_the_next_route(world: World, fault: str) -> None:
    copier = world.copier()
    routes = [world.route(world.channel(**{fault: 1.0})), world.route(world.channel())]
    assert copier.copy(routes, DESTINATION_IDS, "r").wait(10)
    assert world.arrived()
    assert copier.failures == 1
    assert copier.stuck() is None


def test_blocks_that_were_spoiled_where_they_lay_fail_over_every_route(world: World) -> None:
    copier, route = world.copier(), world.route(world.channel())
    world.stores[0].blocks[SOURCE_IDS[1], 17] ^= 1
    with pytest.raises(ChecksumError, match="copied from block 5 of a"):
        copier.copy([route, route], DESTINATION_IDS, "r").wait(10)
    assert copier.mismatches == 2


def test_blocks_without_checksums_are_not_trusted(world: World) -> None:
    with pytest.raises(ChecksumError, match="came with 0 checksums"):
        world.copier().copy([world.route(world.channel(), [])], DESTINATION_IDS, "r").wait(10)


def test_checksums_are_taken_only_where_they_are_wanted(world: World) -> None:
    source = world.stores[0]
    assert asyncio.run(world.copier(verify=False).checksums(source, SOURCE_IDS)) == []
    taken = asyncio.run(world.copier().checksums(source, SOURCE_IDS))
    assert taken == source.checksums(SOURCE_IDS)
    assert len(set(taken)) == 3


def test_a_copy_of_nothing_is_done(world: World) -> None:
    assert world.copier().copy([Route(world.channel(), [])], [], "r").wait(10)


def test_a_delayed_copy_ends_late_and_well(world: World) -> None:
    channel = world.channel(delay=1.0, delay_s=60.0)
    copied = world.copier().copy([world.route(channel)], DESTINATION_IDS, "r")
    assert channel.pending == 1
    assert not copied.done()
    channel.release()
    assert copied.wait(10)
    assert world.arrived()


def test_a_stuck_copy_is_noticed_and_never_done(world: World) -> None:
    channel, copier = world.channel(stuck=1.0), world.copier(verify=False)
    copied = copier.copy([world.route(channel)], DESTINATION_IDS, "r")
    assert world.found_stuck(copier, until_s=5.0) is None
    found = world.found_stuck(copier, until_s=6.0)
    assert isinstance(found, TransferError)
    assert "a to b has not ended within 5 s" in found.message
    assert not copied.done()
    channel.release()
    assert copied.wait(10)
    assert copier.stuck() is None


def test_copies_that_wait_behind_others_are_not_stuck(world: World) -> None:
    channel, copier = world.channel(stuck=1.0), world.copier(verify=False)
    first, second = (copier.copy([world.route(channel)], DESTINATION_IDS, "r") for _ in range(2))
    assert world.found_stuck(copier, until_s=4.0) is None
    channel.release(1)
    assert first.wait(10)
    assert world.found_stuck(copier, until_s=9.0) is None
    assert world.found_stuck(copier, until_s=10.0) is not None
    assert not second.done()


def test_a_process_that_slept_does_not_take_its_copies_for_stuck(world: World) -> None:
    copier = world.copier(verify=False)
    copier.copy([world.route(world.channel(stuck=1.0))], DESTINATION_IDS, "r")
    world.now_s = 100.0
    assert copier.stuck() is None
    assert world.found_stuck(copier, until_s=105.0) is None
    assert world.found_stuck(copier, until_s=106.0) is not None


def test_closing_ends_what_is_stuck(world: World) -> None:
    channel, copier = world.channel(stuck=1.0), world.copier()
    copied = copier.copy([world.route(channel)], DESTINATION_IDS, "r")
    channel.close()
    with pytest.raises(TransferError, match="was closed"):
        copied.wait(10)


def test_the_same_seed_gives_the_same_faults(world: World) -> None:
    def faults(seed: int) -> list[str]:
        plan = FaultPlan(error=0.2, short=0.2, flip=0.2, seed=seed, after=2, most=12)
        channel = FaultyChannel(HostChannel(world.stores[0], world.stores[1]), plan)
        world.opened.append(channel)
        labels = [channel.copy([0], [0]).label for _ in range(40)]
        assert channel.injected.total() == 12
        return labels

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)
    assert all("sound" in label for label in faults(1)[:2])


def test_faults_can_be_limited_to_some_channels(world: World) -> None:
    plans = [FaultPlan(refuse=1.0, only="a>b"), FaultPlan(refuse=1.0, only="cache>")]
    faulty, sound = (FaultyChannel(HostChannel(*world.stores), plan) for plan in plans)
    world.opened += [faulty, sound]
    assert sound.copy([0], [0]).wait(10)
    with pytest.raises(TransferError):
        faulty.copy([0], [0])


@pytest.fixture
def fresh_wrapper() -> Iterator[None]:
    links._wrapper.cache_clear()
    yield
    links._wrapper.cache_clear()


def test_the_environment_installs_it_in_a_process(
    world: World, fresh_wrapper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fault_environment(FaultPlan(refuse=1.0)).items():
        monkeypatch.setenv(name, value)
    assert "refuse" in fault_environment(FaultPlan())[PLAN_VARIABLE]
    channel = links.connect(*world.stores)
    world.opened.append(channel)
    with pytest.raises(TransferError, match="injected"):
        channel.copy([0], [0])


def test_a_wrapper_that_is_not_there_is_refused(
    world: World, fresh_wrapper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(links.WRAPPER_VARIABLE, "alignedserve.nothing:here")
    with pytest.raises(ConfigError, match="cannot be imported"):
        links.connect(*world.stores)


def test_rates_beyond_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        FaultPlan(error=0.6, flip=0.6)


def test_checksums_differ_for_every_flipped_bit() -> None:
    store = HostBlockStore.private("one", KvGeometry("m", "float32", 1, 1, 2, 2), 1)
    sums = set()
    for byte in range(store.block_bytes):
        for bit in range(8):
            store.blocks[0, byte] ^= 1 << bit
            sums.update(store.checksums([0]))
            store.blocks[0, byte] ^= 1 << bit
    assert len(sums) == store.block_bytes * 8
