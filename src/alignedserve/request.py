"""The parts of a request that all processes share: sampling options, identity, finish reasons, stage times."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from alignedserve.errors import InvalidRequestError
from alignedserve.thinking import ThinkingLimit

MAX_SAMPLES = 16
MAX_LOGPROBS = 20
WAIT_OBJECTIVE_S = (0.01, 86_400.0)  # limits; an objective below one iteration could not be met
BATCH_PRIORITY = 1_000_000
"""From this priority on, a request has no hurry: it takes what all others leave, as the requests of a batch do."""


class FinishReason(enum.StrEnum):
    """Why a request ended, with OpenAI's names where there are any."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Stage(enum.StrEnum):
    """The stages of a request. Each is a field `<stage>_s` of the response's timings."""

    QUEUE = "queue"
    PREFILL = "prefill"
    POOL = "pool"
    PREFETCH = "prefetch"
    HANDOVER = "handover"
    DECODE = "decode"


MOST_STEPS = 48  # of a request that are remembered

PROBE = "~probe-"
"""Prefix of the ids of probes (`gateway/pulse.py`). A client's id never contains a tilde."""

PIN = "~pin-"
"""Prefix of the ids under which shards hold pinned prefixes (`kv_pool/kept/pins.py`)."""


class RequestKey(NamedTuple):
    """A request and its epoch, which grows each time the gateway submits the request again.

    The scheduler uses it as the key of its state. As a tuple it hashes and compares three times as fast as a dataclass.
    """

    request_id: str
    epoch: int = 0

    @property
    def is_probe(self) -> bool:
        """Whether this is a gateway's health probe. Predictions must not learn from probes."""
        return self.request_id.startswith(PROBE)


class GrammarKind(enum.StrEnum):
    """What the text of a GrammarSpec is."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    GRAMMAR = "grammar"  # Lark or GBNF
    STRUCTURAL_TAG = "structural_tag"
    COMPOSED = "composed"  # Lark, which may refer to another grammar: reasoning and tool calls around an answer


class GrammarSpec(NamedTuple):
    """The grammar that an answer follows. `whitespace`: pattern between the tokens of JSON; None: at most one space."""

    kind: GrammarKind
    text: str
    whitespace: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults are OpenAI's. Raises InvalidRequestError for invalid values.

    The gateway always sets `seed` before it submits a request, so that a request that is submitted again samples the
    same tokens: token i of an answer depends only on (seed, i) and the logits.
    `logprobs`: None for none; k >= 0 for the log probabilities of the chosen token and of the k most likely tokens.
    `stop_token_ids` end the request and are not part of its text. So do `eos_token_ids`, unless `ignore_eos` is set.
    `logprob_token_ids`: tokens whose log probabilities are reported in place of those of the most likely ones.

    Tokens that may not follow, as in vLLM: all but `allowed_token_ids`, if there are any, and the last token of each
    sequence in `bad_words` after the rest of it in the answer. As in transformers: `bad_words_ids`, which look at the
    prompt too, `no_repeat_ngram_size`, `suppress_tokens`, `begin_suppress_tokens`, `forced_bos_token_id` (the first
    token after a prompt of one token) and `forced_eos_token_id` (the last token that `max_tokens` allows).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    logprob_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    thinking: ThinkingLimit | None = None

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0.0, 2.0)
        _require("top_p", self.top_p, 0.0, 1.0)
        _require("min_p", self.min_p, 0.0, 1.0)
        _require("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be greater than 0", param="top_p")
        if not 0.0 < self.repetition_penalty <= 100.0:
            message = "repetition_penalty must be greater than 0, at most 100"
            raise InvalidRequestError(message, param="repetition_penalty")
        if self.top_k < 0:
            raise InvalidRequestError("top_k must be at least 0 (0: no limit)", param="top_k")
        for name in ("max_tokens", "min_tokens", "no_repeat_ngram_size"):
            if getattr(self, name) < 0:
                raise InvalidRequestError(f"{name} must be at least 0", param=name)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens", param="min_tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the request. With a grammar and `ignore_eos`, only the grammar's end does."""
        ignored = self.ignore_eos and self.grammar is None
        return self.stop_token_ids if ignored else (*self.stop_token_ids, *self.eos_token_ids)

    def ended_by(self, token: int, count: int) -> bool:
        """Whether `token`, the last of `count` tokens of an answer, ends it. `min_tokens` never prolongs a grammar."""
        if self.grammar is not None and token in self.eos_token_ids:
            return True
        return count >= self.min_tokens and token in self.end_token_ids

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # a NaN fails too
        raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)


@dataclass(slots=True)
class Stopwatch:
    """Seconds that a request has spent in each stage. The stopwatch is sent with the request.

    Times are Unix nanoseconds, so that processes on one node, or on nodes with synchronised clocks, can update it.
    """

    stage: Stage = Stage.QUEUE
    since_ns: int = 0
    spent_s: dict[Stage, float] = field(default_factory=dict)
    steps: list[tuple[Stage, int]] = field(default_factory=list)
    """The first MOST_STEPS stages that are over, in order, and when each began. An eviction repeats stages."""
    bubble_s: float | None = None
    """Predicted seconds of `decode` lost to unequal prefix lengths (the bubble). None: there is no cost model."""

    def waste(self, bubble_s: float) -> None:
        """Add an iteration's predicted bubble in seconds. It is negative if unequal lengths shortened the iteration."""
        self.bubble_s = (self.bubble_s or 0.0) + bubble_s

    @property
    def begun_ns(self) -> dict[Stage, int]:
        """When each finished stage first began, in Unix nanoseconds."""
        return dict(reversed(self.steps))

    def enter(self, stage: Stage, now_ns: int) -> None:
        """Close the current stage at `now_ns` and open `stage`."""
        self.close(now_ns)
        self.stage = stage

    def close(self, now_ns: int) -> None:
        if self.since_ns:
            if (not self.steps or self.steps[-1][0] is not self.stage) and len(self.steps) < MOST_STEPS:
                self.steps.append((self.stage, self.since_ns))
            self.spent_s[self.stage] = self.spent_s.get(self.stage, 0.0) + max(0, now_ns - self.since_ns) / 1e9
        self.since_ns = now_ns


@dataclass(slots=True)
class RequestSpec:
    """Everything that a worker needs to start or continue a request.

    `prompt_token_ids` is the client's prompt. `output_token_ids` are the tokens generated so far, in this epoch or
    delivered in an earlier one. Penalties, stop strings and the seed's position count them.
    Requests of one `group_id` are the `n` answers to one prompt and may share its blocks.
    `wait_objective_s` is the request's wait objective; 0 means the configured default. `priority`: a signed 64-bit
    integer; of what waits, a lower one goes first. Only prompts with the same `cache_salt` share cached KV.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    gateway_id: str = ""
    gateway_address: str = ""
    group_id: str = ""
    group_size: int = 1
    arrival_ns: int = 0
    deadline_ns: int = 0
    wait_objective_s: float = 0.0
    priority: int = 0
    cache_salt: bytes = b""
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @property
    def prefix_length(self) -> int:
        """Number of tokens that the next token attends to: the prompt and the answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def remaining_tokens(self) -> int:
        return self.sampling.max_tokens - len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one token: of the token itself, and (id, logprob) of the most likely.

    `rank`: the token's place among the most likely, from 1; 0: unknown. It is computed for tokens of prompts.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0

    def most(self, count: int) -> TokenLogprobs:
        """With `count` of the most likely tokens at most."""
        return self if len(self.top) <= count else replace(self, top=self.top[:count])
