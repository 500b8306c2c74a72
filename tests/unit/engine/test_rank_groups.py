"""The connections of ranks: who is let in, and how values reach ranks of other nodes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from alignedserve.engine.parallel import group as group_module
from alignedserve.engine.parallel.group import RankGroup
from alignedserve.engine.parallel.rendezvous import AskedValues, RankChannel
from alignedserve.errors import RankLostError, TransferError
from alignedserve.transfer.paired.addresses import GroupStore, Values
from alignedserve.transfer.paired.identity import listening
from alignedserve.transfer.paired.rendezvous import Rendezvous


def groups_of(values: Sequence[Values]) -> list[RankGroup]:
    def group(rank: int) -> RankGroup:
        return RankGroup(GroupStore(values[rank], "waits", 20.0), rank, len(values), 20.0)

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(group, range(len(values))))


def test_ranks_take_no_connections_once_they_have_met() -> None:
    before = listening()
    groups = groups_of([Rendezvous(lambda key, value: None)] * 2)
    ports = listening() - before
    assert len(ports) == 2
    for address in ports:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(lambda each: each.sum(torch.ones(2)), groups))
    assert all(torch.equal(each, torch.full((2,), 2.0)) for each in sums)


def test_large_messages_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "UNSENT_BYTES", 5_000)
    sender, receiver = groups_of([Rendezvous(lambda key, value: None)] * 2)
    messages = [torch.full((1000,), float(number)) for number in range(4)]  # 4,000 bytes each

    def send_all() -> None:
        for message in messages:
            sender.send(message, 1)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_all)
        with pytest.raises(TimeoutError):
            sending.result(0.5)  # the third waits for the first
        received = [receiver.receiving(torch.empty(1000), 0)() for _ in messages]
        sending.result(10.0)
    assert all(map(torch.equal, received, messages))
    assert sum(message.nbytes for _, message in sender._sending) <= 8_000


def test_what_rank_0_tells_is_one_message_unless_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_FRAME_BYTES", 64)
    first, *others = groups_of([Rendezvous(lambda key, value: None)] * 3)
    sent: list[int] = []
    send = first.send
    monkeypatch.setattr(first, "send", lambda tensor, to: (sent.append(to), send(tensor, to)))
    for size in (0, 1, 8, 9, 40):
        sent.clear()
        first.tell(-size, torch.arange(size))
        assert sent == ([1, 2] if size <= 8 else [1, 1, 2, 2])
        for other in others:
            kind, values = other.told()
            assert (kind, values.view(torch.int64).tolist()) == (-size, list(range(size)))


@pytest.mark.parametrize("late", ["attention", "experts"])
def test_ranks_know_how_long_they_waited_for_the_last_one_of_each_layer(late: str) -> None:
    """Two layers, the first with a late rank: what they waited is told with the counts of the second."""
    groups = groups_of([Rendezvous(lambda key, value: None)] * 3)

    def layers(group: RankGroup) -> list[list[int]]:
        tables = []
        for layer in range(2):
            pause_s = 0.4 if group.rank == 1 and not layer else 0.0
            time.sleep(pause_s if late == "attention" else 0.0)
            sizes = torch.full((3,), group.rank + 1)
            tables.append(group.counted(sizes).tolist())
            time.sleep(pause_s if late == "experts" else 0.0)
            found = group.returned(torch.full((3, 1), float(group.rank)), [1, 1, 1], [1, 1, 1])
            assert found.flatten().tolist() == [0.0, 1.0, 2.0]
        return tables

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(layers, groups)) == [[[[1] * 3, [2] * 3, [3] * 3]] * 2] * 3
    other = "experts" if late == "attention" else "attention"
    for group in groups:
        assert group.idle_s[late] > 0.5  # two ranks wait for 0.4 s each, less as far as they are late themselves
        assert group.idle_s[other] < 0.5 * group.idle_s[late]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_without_the_secret_is_refused_by_each_other(ranks: int) -> None:
    values = Rendezvous(lambda key, value: None)

    class Guessing:
        def set(self, key: str, value: bytes) -> None:
            values.set(key, value)

        def get(self, key: str, timeout_s: float) -> bytes:
            return bytes(32) if key.endswith("/secret") else values.get(key, timeout_s)

    with pytest.raises(RankLostError, match="is not the other process"):
        groups_of([values] * (ranks - 1) + [Guessing()])


def test_the_proof_covers_the_connection_of_each_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are not neighbours in what all compute: here rank 2 lies to rank 0 alone."""
    honest = group_module.proof

    def lying(secret: bytes, name: str, rank: int) -> bytes:
        return bytes(32) if (name, rank) == ("waits to 0", 2) else honest(secret, name, rank)

    monkeypatch.setattr(group_module, "proof", lying)
    with pytest.raises(RankLostError, match=r"rank 0 of 4 .* is not the other process"):
        groups_of([Rendezvous(lambda key, value: None)] * 4)


def test_a_rank_asks_its_parent_for_values_and_says_the_rest_to_it() -> None:
    told: list[tuple[str, bytes]] = []
    values = Rendezvous(lambda key, value: told.append((key, value)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, asked = RankChannel(ours, values, 0.2), AskedValues(theirs)
    asked.set("waits/0", b"\x00\xff")
    values.heard("waits/1", b"address")
    assert asked.get("waits/1", 5.0) == b"address"
    assert told == [("waits/0", b"\x00\xff")]
    with pytest.raises(TransferError, match=r"did not connect: .*silent for 0\.2 s"):
        asked.get("waits/2", 5.0)
    theirs.send(json.dumps({"held": 1}).encode())
    assert channel.told(5.0) == {"held": 1}
    theirs.close()
    channel.close()


def test_a_rank_that_ends_without_a_word_is_lost() -> None:
    for values in (None, Rendezvous(lambda key, value: None)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = RankChannel(ours, values, 0.2)
        theirs.close()
        with pytest.raises(RankLostError, match="does not say what it holds"):
            channel.told(5.0)
        channel.close()
