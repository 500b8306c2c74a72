"""Groups of prompts that share a prefix: who is in which, what is saved, and the order."""

from __future__ import annotations

import gc
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve import prefix_groups as module
from alignedserve.prefix_groups import PrefixGroup, prefix_groups, shared_share


def groups(*prompts: str) -> list[PrefixGroup]:
    return prefix_groups([prompt.encode() for prompt in prompts], 1)


def test_prompts_of_one_prefix_are_together_and_the_shortest_groups_first() -> None:
    found = groups("aaaaaaaa1", "q", "aaaaaaaa2", "bbb1", "bbb2")
    assert found == [PrefixGroup(0, (1,)), PrefixGroup(3, (3, 4)), PrefixGroup(8, (0, 2))]


def test_a_prefix_is_joined_with_a_longer_one_below_it_where_that_saves_more() -> None:
    # The second level saves 4 for the 2 that are computed twice.
    assert groups("abcdef1", "abcdef2", "abx", "aby") == [PrefixGroup(2, (2, 3)), PrefixGroup(6, (0, 1))]
    # Here it would save 1: one level with everybody is better.
    assert groups("abcdefg1", "abcdefg2", "abcdefx", "abcdefy") == [PrefixGroup(6, (0, 1, 2, 3))]


def test_equal_prompts_empty_ones_and_prefixes_of_others() -> None:
    assert groups("", "aa", "aa", "aab") == [PrefixGroup(0, (0,)), PrefixGroup(2, (1, 2, 3))]
    assert groups() == []


@settings(max_examples=60)
@given(st.lists(st.text("ab", max_size=12), max_size=12))
def test_every_prompt_is_in_one_group_of_its_prefix(prompts: list[str]) -> None:
    found = groups(*prompts)
    assert sorted(member for group in found for member in group.members) == list(range(len(prompts)))
    lengths = [len(prompt) for prompt in prompts]
    for group in found:
        texts = {prompts[member][: group.prefix] for member in group.members}
        assert len(texts) == 1
        assert len(texts.pop()) == group.prefix
        assert len(group.members) > 1 or group.prefix == 0
    work = [group.work(lengths) for group in found]
    assert work == sorted(work)
    plain: dict[str, int] = {}  # by the first letter: one level without joining
    for prompt in prompts:
        plain[prompt[:1]] = plain.get(prompt[:1], 0) + 1
    assert shared_share(found, lengths) * sum(lengths) >= sum(n - 1 for one, n in plain.items() if one) - 1e-6


def test_sorting_in_parts_changes_nothing_and_collects_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    prompts = [bytes(rng.choices(b"ab", k=rng.randrange(12))) for _ in range(2000)]
    gc.collect()
    collected = gc.get_stats()[2]["collections"]
    found = prefix_groups(prompts, 1)
    assert gc.get_stats()[2]["collections"] == collected, "of the oldest objects, which takes long"
    monkeypatch.setattr(module, "PART", len(prompts))
    assert prefix_groups(prompts, 1) == found


def test_a_chain_of_a_thousand_turns_needs_no_recursion() -> None:
    found = groups(*("a" * n for n in range(1, 1500)))
    assert sum(len(group.members) for group in found) == 1499


def test_eight_thousand_prompts_of_the_papers_workload(record_property) -> None:  # type: ignore[no-untyped-def]
    """Prefixes of 1,570 tokens, 3 prompts each, 30 tokens of their own. The paper: 1.5 s. Time is only reported."""
    rng = random.Random(0)
    shared = [rng.randbytes(4 * 1570) for _ in range(2667)]
    prompts = [shared[number % len(shared)] + rng.randbytes(4 * 30) for number in range(8000)]
    begun_s = time.perf_counter()
    found = prefix_groups(prompts)
    record_property("seconds", time.perf_counter() - begun_s)
    assert len(found) == len(shared)
    assert 0.65 < shared_share(found, [len(prompt) // 4 for prompt in prompts]) < 0.66
