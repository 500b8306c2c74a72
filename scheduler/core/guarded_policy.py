"""Guards a user-defined policy so that it can neither crash the scheduler nor lose a request.

Its results are checked: waiting requests only, each once, within the limits, with the seed. If it raises or returns
anything else, the oldest requests that fit are used instead, the fault is counted, and an alarm is raised. The
simulator raises an error instead, since it is used to try policies out.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.request import RequestKey
from alignedserve.scheduler.core.alarm import LastMinute
from alignedserve.scheduler.cost.step import StepCost
from alignedserve.scheduler.policies.base import BatchLimits, BatchPolicy, Entry, InstanceState
from alignedserve.scheduler.policies.fcfs import FcfsPolicy

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
MOST_FAULTS = 16  # after this many it is no longer called


class BadAnswerError(ValueError):
    """A result that violates the contract."""


class Faults:
    """The faults of a policy, whichever of its objects has them. `latest`: "" if there was none."""

    def __init__(self) -> None:
        self.count = 0
        self.latest = ""
        self.trusted = True  # False for good: it is no longer called
        self._name = ""
        self._noticed = 0
        self._lately = LastMinute()

    def note(self, name: str, fault: str) -> None:
        self.count += 1
        self._name, self.latest = name, fault
        self.trusted = self.trusted and self.count < MOST_FAULTS

    def alarm(self, now_s: float) -> str:
        """Alarm text, for a minute after a fault was noticed here, and always once the policy is no longer called."""
        self._lately.add(now_s, self.count - self._noticed)
        self._noticed = self.count
        if self.trusted and not self._lately.count(now_s):
            return ""
        state = "" if self.trusted else "; it is no longer called"
        return f"policy {self._name}: {self.count} faults, the latest: {self.latest}{state}"


class GuardedPolicy(BatchPolicy):
    """`strict`: raise ConfigError at its first fault."""

    def __init__(
        self, config: SchedulerConfig, name: str, kind: type[BatchPolicy], faults: Faults | None = None
    ) -> None:
        """`faults`: the record that it shares with others; None: its own.

        Raises ConfigError if the policy cannot be created.
        """
        try:
            self.inner = kind(config)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"policy {name!r} cannot be created: {type(error).__name__}: {error}") from error
        self.BY_LENGTH = bool(kind.BY_LENGTH)  # type: ignore[misc]
        self.strict = False
        self.faults = Faults() if faults is None else faults
        self._name = name
        self._entries: dict[RequestKey, Entry] = {}
        self._oldest = FcfsPolicy(config)

    def insert(self, entry: Entry) -> None:
        self._oldest.insert(entry)
        self._entries[entry.key] = entry
        self._tell(lambda: self.inner.insert(entry))

    def remove(self, key: RequestKey) -> None:
        self._oldest.remove(key)
        del self._entries[key]
        self._tell(lambda: self.inner.remove(key))

    def totals(self) -> tuple[int, int]:
        return self._oldest.totals()

    def form(self, limits: BatchLimits, seed: RequestKey | None, now_s: float) -> list[Entry]:
        found = self._ask("form", lambda: self._checked(self.inner.form(limits, seed, now_s), limits, seed))
        return self._oldest.form(limits, seed, now_s) if found is None else found

    def matches(self, tokens: int, shortest_tokens: int, longest_tokens: int) -> bool:
        return bool(self._ask("matches", lambda: self.inner.matches(tokens, shortest_tokens, longest_tokens)))

    def matching(self, shortest_tokens: int, longest_tokens: int, limits: BatchLimits) -> list[Entry]:
        found = self._ask(
            "matching", lambda: self._waiting(self.inner.matching(shortest_tokens, longest_tokens, limits), limits)
        )
        return found or []

    def overtakes(self) -> bool:
        return bool(self._ask("overtakes", self.inner.overtakes))

    def look_at(self, instance: InstanceState) -> None:
        self._ask("look_at", lambda: self.inner.look_at(instance))

    def use_cost(self, cost: StepCost) -> None:
        self._ask("use_cost", lambda: self.inner.use_cost(cost))

    def check_integrity(self) -> None:
        """Checks the guard's own state. An inconsistent state of the policy is a fault of the policy."""
        self._oldest.check_integrity()
        self._ask("check_integrity", self.inner.check_integrity)

    def _checked(self, answer: Iterable[Entry], limits: BatchLimits, seed: RequestKey | None) -> list[Entry]:
        """The checked candidate batch. Raises BadAnswerError if it is invalid."""
        found = list(answer)
        if len(found) == 1 and found[0].key in self._entries:  # a single request may exceed the limits
            batch = [self._entries[found[0].key]]
        else:
            batch = self._waiting(found, limits)
        if not batch and self._entries:
            raise BadAnswerError("it is empty although requests are waiting")
        if seed is not None and all(entry.key != seed for entry in batch):
            raise BadAnswerError(f"it lacks the overdue request {seed}")
        return batch

    def _waiting(self, answer: Iterable[Entry], limits: BatchLimits) -> list[Entry]:
        """The guard's own entries for these, within the limits. Raises BadAnswerError."""
        keys = [entry.key for entry in answer]
        if unknown := [key for key in keys if key not in self._entries]:
            raise BadAnswerError(f"it contains {unknown[0]}, which is not waiting")
        if len(set(keys)) < len(keys):
            raise BadAnswerError("it contains a request twice")
        entries = [self._entries[key] for key in keys]
        blocks = sum(entry.blocks for entry in entries)
        if len(entries) > limits.max_requests or blocks > limits.max_blocks:
            raise BadAnswerError(
                f"{len(entries)} requests with {blocks} blocks exceed the limit of {limits.max_requests} with "
                f"{limits.max_blocks}"
            )
        return entries

    def _tell(self, call: Callable[[], None]) -> None:
        """Report a change to the policy.

        If that fails, its state is wrong from here on, and it is no longer trusted.
        """
        before = self.faults.count
        self._ask("insert or remove", call)
        self.faults.trusted = self.faults.trusted and self.faults.count == before

    def _ask(self, what: str, call: Callable[[], Answer]) -> Answer | None:
        if not self.faults.trusted:
            return None
        try:
            return call()
        except Exception as error:
            raised = None if isinstance(error, BadAnswerError) else error
            fault = f"{what}: {error if raised is None else repr(error) + place_of(error)}"
            self.faults.note(self._name, fault)
            if self.strict:
                raise ConfigError(f"policy {self._name!r}, {fault}") from error
            instead = "the oldest requests are used instead"
            logger.warning("policy %s, %s: %s", self._name, fault, instead, exc_info=raised)
            return None


def place_of(error: BaseException) -> str:
    """` (FILE:LINE)` where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
