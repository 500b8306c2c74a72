"""A shard with a prefix index, in the state machine of `support/prefix_machine.py`."""

from __future__ import annotations

import pytest

from alignedserve.errors import AlignedServeError
from alignedserve.kv_pool.records import WriterKey
from support.machines import machine_settings
from support.prefix_machine import CAPACITY, ROOTS, ManyMachine, PrefixMachine

TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = machine_settings(30, 40)
TestPrefixMany = ManyMachine.TestCase
TestPrefixMany.settings = machine_settings(15, 40)


def test_the_model_notices_a_block_that_was_written_to_after_it_was_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of evicted blocks that stay valid: the check above must fail."""
    machine = PrefixMachine()
    machine.start(collide=False, lru=True, reserve=0)
    monkeypatch.setattr(type(machine.index.entries), "withdraw_each", lambda *_: None)
    writer = WriterKey("decode", "d", 1)
    machine.commit(writer, "a", (ROOTS[0], [0, 1, 0, 1], 0), -1)
    machine.release("a", -1, "release")
    machine.want(writer, 2 * CAPACITY, -1)
    with pytest.raises(AlignedServeError, match="prefix index is wrong"):
        machine.what_is_found_is_what_was_written()
