"""Copies that need both processes of a pair: over Gloo between two real processes, with breaks, deaths and refusals."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from alignedserve.errors import GeometryMismatchError, TransferError
from alignedserve.geometry import KvGeometry, StoreSlice
from alignedserve.proto import common_pb2 as pb
from alignedserve.proto import paired_copies_pb2 as pc
from alignedserve.transfer.block_store import HostBlockStore
from alignedserve.transfer.copier import Copier, Route
from alignedserve.transfer.device import DeviceBlockStore
from alignedserve.transfer.links import connect
from alignedserve.transfer.paired.blocks import HostBlocks
from alignedserve.transfer.paired.channel import PairedChannel
from alignedserve.transfer.paired.client import ClientSession, PairClient
from alignedserve.transfer.paired.peer import PeerProcess, PeerSpec, make_store
from alignedserve.transfer.paired.remote import RemoteBlockStore
from alignedserve.transfer.paired.transport import ASKING_RANK
from support.pairs import CHANNEL

GEOMETRY = KvGeometry("pair", "float16", layers=4, kv_heads=2, head_dim=8, block_size=4)
BLOCKS = 64
AWAY_S = 4.0
SPEC = PeerSpec(GEOMETRY, BLOCKS, silent_s=2.0)


class Pair:
    """This process's end, with a cache, beside a peer process with two buffers."""

    def __init__(
        self, peer: PeerProcess, cache: HostBlockStore | DeviceBlockStore | None = None, away_s: float = AWAY_S
    ) -> None:
        self.peer = peer
        wiring = replace(peer.spec.wiring(ASKING_RANK, "cpu"), piece_bytes=8 * GEOMETRY.block_bytes)
        self.client = PairClient(pb.ProcessKey(role="decode", id="decode-0"), wiring, GEOMETRY, "peer", away_s=away_s)
        self.cache = cache or HostBlockStore.private("cache", GEOMETRY, BLOCKS)
        self.batch, self.requests = (RemoteBlockStore(h, self.client) for h in self.peer.handles)
        self.peer.connect(self.client)
        self.pull = PairedChannel(self.batch, self.cache)
        self.pull_requests = PairedChannel(self.requests, self.cache)
        self.push = PairedChannel(self.cache, self.requests)

    def break_session(self) -> None:
        session = self.client._session
        if session is not None:
            session.trouble("a test broke it")

    def close(self) -> None:
        self.client.close()
        for channel in (self.pull, self.pull_requests, self.push):
            channel.close()


@pytest.fixture(scope="module", params=[CHANNEL])
def peer(request: pytest.FixtureRequest) -> Iterator[PeerProcess]:
    """One process for most tests, as it takes seconds to start. Each test has its own client.

    The first connection loads the transport at both ends, which takes longer than AWAY_S on a busy machine.
    """
    with PeerProcess(replace(SPEC, channel=request.param)) as peer:
        first = Pair(peer, away_s=60.0)
        assert first.pull.copy([0], [0]).wait(60)
        first.close()
        yield peer


@pytest.fixture
def pair(peer: PeerProcess) -> Iterator[Pair]:
    pair = Pair(peer)
    yield pair
    pair.close()


def test_blocks_come_from_the_peer_and_go_back_to_it(pair: Pair) -> None:
    draw = random.Random(1)
    theirs, ours = draw.sample(range(BLOCKS), 30), draw.sample(range(BLOCKS), 30)
    assert pair.pull.copy(theirs, ours).wait(20)
    expected = make_store(SPEC, pair.batch.store_id)
    assert pair.cache.checksums(ours) == expected.checksums(theirs)
    untouched = [block for block in range(BLOCKS) if block not in ours]
    assert not pair.cache.blocks[untouched].any()

    back = draw.sample(range(BLOCKS), 30)
    assert pair.push.copy(ours, back).wait(20)
    assert pair.requests.checksums(back) == expected.checksums(theirs)
    counters = pair.pull.counters()
    assert (counters.copies, counters.blocks, counters.bytes) == (1, 30, 30 * GEOMETRY.block_bytes)
    assert pair.pull.name == pair.peer.spec.channel


def test_a_block_of_the_peer_can_be_read(pair: Pair) -> None:
    expected = make_store(SPEC, pair.batch.store_id)
    assert all(pair.batch.read_block(block) == expected.read_block(block) for block in (0, 7))


def test_blocks_go_from_one_peer_to_another_through_this_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.transfer.paired.channel.RELAY_BYTES", 3 * GEOMETRY.block_bytes)
    between = connect(pair.batch, pair.requests)
    draw = random.Random(3)
    theirs, others = draw.sample(range(BLOCKS), 10), draw.sample(range(BLOCKS), 10)
    try:
        assert between.copy(theirs, others).wait(20)
        assert pair.requests.checksums(others) == make_store(SPEC, pair.batch.store_id).checksums(theirs)
        assert (between.name, between.counters().blocks) == (pair.peer.spec.channel, 10)
        assert between.copy(theirs[:2], others[:2], layers=(1, 2)).wait(20)
    finally:
        between.close()


def test_only_the_layers_that_are_asked_for_arrive(pair: Pair) -> None:
    assert pair.pull.copy([3, 9], [0, 5], layers=(1, 3)).wait(20)
    expected = make_store(SPEC, pair.batch.store_id)
    assert isinstance(expected, HostBlockStore)
    layer = GEOMETRY.block_bytes // GEOMETRY.layers
    for theirs, ours in ((3, 0), (9, 5)):
        assert np.array_equal(pair.cache.blocks[ours, layer : 3 * layer], expected.blocks[theirs, layer : 3 * layer])
        assert not pair.cache.blocks[ours, :layer].any()
        assert not pair.cache.blocks[ours, 3 * layer :].any()


@pytest.mark.parametrize("part", [StoreSlice(1, 3, 0, 2), StoreSlice(0, 4, 1, 2), StoreSlice(2, 4, 0, 1)])
def test_a_cache_of_some_layers_or_heads_gets_its_share(peer: PeerProcess, part: StoreSlice) -> None:
    tensor = torch.zeros(BLOCKS, *part.shape, 2, GEOMETRY.block_size, GEOMETRY.head_dim, dtype=torch.float16)
    pair = Pair(peer, DeviceBlockStore("cache", GEOMETRY, tensor, part=part))
    try:
        ids = random.Random(2).sample(range(BLOCKS), 20)
        assert pair.pull.copy(ids, range(20)).wait(20)
        whole = make_store(SPEC, pair.batch.store_id)
        assert isinstance(whole, HostBlockStore)
        blocks = torch.from_numpy(whole.blocks[ids]).view(torch.float16).view(20, *GEOMETRY.block_shape)
        wanted = blocks[:, part.layer_begin : part.layer_end, part.head_begin : part.head_end]
        assert torch.equal(tensor[:20].view(torch.int16), wanted.contiguous().view(torch.int16))
        assert not tensor[20:].any()
    finally:
        pair.close()


def test_evictions_do_not_wait_for_a_long_pull(pair: Pair) -> None:
    pulls = [pair.pull.copy(range(BLOCKS), range(BLOCKS)) for _ in range(40)]
    pushed = pair.push.copy([1, 2], [3, 4])
    other = pair.pull_requests.copy([7], [7])
    assert pushed.wait(20)
    assert other.wait(20)
    assert not all(pull.done() for pull in pulls)
    assert all(pull.wait(20) for pull in pulls)


def test_what_the_peer_cannot_serve_is_refused_and_the_pair_goes_on(pair: Pair) -> None:
    stranger = RemoteBlockStore(replace(pair.peer.handles[0], store_id="peer/none"), pair.client)
    channel = PairedChannel(stranger, pair.cache)
    with pytest.raises(TransferError, match=r"no store peer/none here; the stores are peer/batch, peer/requests"):
        channel.copy([0], [0]).wait(20)
    with pytest.raises(TransferError, match="no store peer/none"):
        stranger.checksums([0])
    channel.close()
    larger = RemoteBlockStore(replace(pair.peer.handles[0], capacity_blocks=2 * BLOCKS), pair.client)
    channel = PairedChannel(larger, pair.cache)
    with pytest.raises(TransferError, match=rf"has blocks 0 to {BLOCKS - 1}, not \[{BLOCKS}\]"):
        channel.copy([BLOCKS], [0]).wait(20)
    channel.close()
    assert pair.pull.copy([1], [1]).wait(20)
    assert pair.client.sessions == 1


def test_stores_of_another_model_are_refused_by_name(pair: Pair) -> None:
    other = replace(GEOMETRY, model="other", layers=8)
    with pytest.raises(GeometryMismatchError, match=r"pair float16, 4 layers.*other float16, 8 layers"):
        PairedChannel(pair.batch, HostBlockStore.private("cache", other, 4))


def test_copies_wait_for_the_next_session_when_one_breaks(pair: Pair) -> None:
    assert pair.pull.copy([0], [0]).wait(20)
    pair.break_session()
    pulls = [pair.pull.copy([block], [block]) for block in range(1, 20)]
    assert all(pull.wait(20) for pull in pulls)
    pair.break_session()
    pushes = [pair.push.copy([block], [block]) for block in range(20)]
    assert all(push.wait(20) for push in pushes)
    assert pair.client.sessions == 3
    assert pair.requests.checksums(range(20)) == make_store(SPEC, pair.batch.store_id).checksums(range(20))


def test_a_session_that_breaks_in_a_copy_costs_a_second_try(pair: Pair) -> None:
    """The copier retries by its routes: nothing is lost, and nothing arrives that was not sent."""
    copier = Copier(verify=True, timeout_s=20.0)
    expected = make_store(SPEC, pair.batch.store_id).checksums(range(BLOCKS))
    route = Route(pair.pull, list(range(BLOCKS)), expected)
    copies = []
    for number in range(60):
        copies.append(copier.copy([route, route, route], list(range(BLOCKS)), f"r{number}"))
        if number in (15, 40):
            pair.break_session()
    assert all(copy.wait(20) for copy in copies)
    assert copier.mismatches == 0
    assert pair.client.sessions >= 2
    copier.close()


def test_the_trouble_of_a_session_is_reported_once_and_not_after_its_end() -> None:
    reports: list[int] = []

    def session(number: int) -> ClientSession:
        wiring = SPEC.wiring(ASKING_RANK, "cpu")
        return ClientSession(number, wiring, ("pull",), "peer", lambda command: None, lambda: reports.append(number))

    broken, ended = session(1), session(2)
    broken.trouble("a copy failed")
    broken.trouble("so did its connection")
    ended.end("its stream has ended")
    ended.trouble("a copy failed")
    assert reports == [1]


def test_a_dead_peer_is_noticed_at_once_and_a_stopped_one_after_its_time_and_neither_takes_another_pair(
    pair: Pair,
) -> None:
    with PeerProcess(pair.peer.spec) as peer:
        mortal = Pair(peer)
        assert mortal.pull.copy([0], [0]).wait(20)
        os.kill(peer.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        copier = Copier(verify=False, timeout_s=SPEC.silent_s / 4)
        copy = copier.copy([Route(mortal.pull, range(BLOCKS))], range(BLOCKS), "r")
        while not copy.done():
            assert copier.stuck() is None  # the peer is, not this process
            time.sleep(0.05)
        copier.close()
        with pytest.raises(TransferError, match="peer"):
            copy.wait()
        assert SPEC.silent_s * 0.9 < time.monotonic() - begun < SPEC.silent_s + 2.0
        os.kill(peer.process.pid, signal.SIGCONT)
        assert mortal.pull.copy([0], [0]).wait(20)

        doomed = [mortal.pull.copy(range(BLOCKS), range(BLOCKS)) for _ in range(200)]
        went_on = [pair.pull.copy(range(BLOCKS), range(BLOCKS)) for _ in range(50)]
        begun = time.monotonic()
        peer.process.kill()
        with pytest.raises(TransferError):
            doomed[-1].wait(20)  # after all copies that were running or waited for another session
        assert time.monotonic() - begun < AWAY_S + 2.0
        assert all(copy.wait(20) for copy in went_on)
        assert pair.client.sessions == 1
        mortal.close()


def test_an_eviction_to_a_peer_that_is_silent_fails_in_time_and_is_in_doubt_until_the_peer_is_back(
    peer: PeerProcess,
) -> None:
    with PeerProcess(peer.spec) as peer:
        pair = Pair(peer)
        assert pair.push.copy([0], [0]).wait(20)
        os.kill(peer.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(TransferError, match="peer"):
            pair.push.copy(range(BLOCKS), range(BLOCKS)).wait(20)
        assert time.monotonic() - begun < SPEC.silent_s + AWAY_S + 2.0
        assert not pair.client.settled
        os.kill(peer.process.pid, signal.SIGCONT)
        deadline = time.monotonic() + 20.0
        while not pair.client.settled and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pair.client.settled
        assert pair.push.copy([1], [1]).wait(20)
        assert pair.requests.checksums([1]) == pair.cache.checksums([1])
        pair.close()


def test_a_copy_that_hangs_in_this_process_is_found_stuck_and_one_that_waits_for_the_peer_is_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = threading.Event(), HostBlocks.write

    def hang(self: HostBlocks, *arguments: Any) -> None:
        assert written.wait(20.0)
        write(self, *arguments)

    monkeypatch.setattr(HostBlocks, "write", hang)
    copier = Copier(verify=False, timeout_s=0.5)
    copy = copier.copy([Route(pair.pull, [1])], [2], "r")
    deadline = time.monotonic() + 20.0
    while (stuck := copier.stuck()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    written.set()
    assert copy.wait(20.0)
    copier.close()
    assert "peer/batch to cache has not ended" in str(stuck)


def test_stores_that_are_both_here_are_no_pair(pair: Pair) -> None:
    with pytest.raises(TransferError, match="not in two processes"):
        PairedChannel(pair.cache, pair.cache)


@pytest.mark.parametrize("comes", [True, False])
def test_a_connection_that_is_about_to_come_is_waited_for_however_long_there_was_none(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    away_s = 0.5

    def connect(session: ClientSession) -> None:
        time.sleep(0.1 if comes else 2 * away_s)
        session.up = comes

    monkeypatch.setattr(ClientSession, "connect", connect)
    process = pb.ProcessKey(role="decode", id="decode-0")
    client = PairClient(process, SPEC.wiring(ASKING_RANK, "cpu"), GEOMETRY, "peer", away_s=away_s)
    time.sleep(1.5 * away_s)
    with pytest.raises(TransferError, match="none for"):
        client.checksums("store", [0])
    client.begin(lambda command: None, lambda: None)
    client.on_event(pc.PairEvent(opened=pc.PairOpened()))
    begun = time.monotonic()
    if comes:
        assert client._wait_up().up
    else:
        with pytest.raises(TransferError, match="none for"):
            client.checksums("store", [0])
        assert time.monotonic() - begun >= 0.9 * away_s
    client.close()
