"""An upper bound for comparison, in the simulator only: it knows output lengths, and takes the fewest left first."""

from __future__ import annotations

from collections.abc import Mapping

from alignedserve.config import SchedulerConfig
from alignedserve.errors import ConfigError
from alignedserve.scheduler.policies.base import Entry
from alignedserve.scheduler.policies.queue import QueuePolicy


class OraclePolicy(QueuePolicy):
    NEEDS_OUTPUT_LENGTHS = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._final_tokens: Mapping[str, int] = {}

    def reveal(self, final_tokens: Mapping[str, int]) -> None:
        """Tokens, prompt and answer, with which each request will end, by request id.

        Call it before the first insert.
        """
        self._final_tokens = final_tokens

    def rank(self, entry: Entry) -> tuple[int, float]:
        """(tokens left, waiting since). Raises ConfigError for a request with unknown output length."""
        final = self._final_tokens.get(entry.key.request_id)
        if final is None:
            raise ConfigError(f"policy oracle: {entry.key.request_id} has no known output length: simulator only")
        return final - entry.tokens, entry.since_s
