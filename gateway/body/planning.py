"""Turns a validated request body into a CallPlan: tokens, limits of the model and the cluster, sampling defaults."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from alignedserve.config import EngineConfig
from alignedserve.errors import DeadlineError, GrammarError, InvalidRequestError, UnavailableError
from alignedserve.gateway.body.answer_form import chat_form
from alignedserve.gateway.body.model_values import check_vocabulary, least_tokens, model_values
from alignedserve.gateway.body.nested import text_size
from alignedserve.gateway.body.requests import ChatRequest, CompletionRequest, GenerationRequest, ReplyOptions
from alignedserve.gateway.body.suffix import with_suffix
from alignedserve.gateway.body.tokenising import LONG_TEXT, TooManyTokens, check_size, in_turn, tokenise
from alignedserve.gateway.body.truncation import CHAT_ANSWER, MOST, most_tokens, truncated
from alignedserve.gateway.body.turns import turns_for
from alignedserve.gateway.dialects.families import AUTO
from alignedserve.gateway.dialects.model_dialects import ModelDialects, Reading, choose_dialects
from alignedserve.gateway.failures import ContextLengthError, ModelNotFoundError
from alignedserve.gateway.tracing.current import note_chat
from alignedserve.grammar.compiled import Grammars
from alignedserve.model import ModelInfo
from alignedserve.request import GrammarSpec, SamplingParams
from alignedserve.text import ChatTemplate, Prompt, PromptEncoder, Tokenizer

if TYPE_CHECKING:
    from alignedserve.gateway.ledger.resume import Delivered

DEFAULT_MAX_TOKENS = 16
_TOO_LONG = "this model's maximum context length is"  # clients look for these words
_MESSAGE = 64  # characters: rendering a message costs about as much as rendering this much text


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and the sampling parameters of its answers. `text` is None if the client sent token ids."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    text: str | None = None
    cached: tuple[tuple[str, int], ...] = ()  # (shard, tokens) that prefix caches have of it
    reads: tuple[tuple[str, float], ...] = ()  # (shard, predicted seconds) until what is on disk of it is in memory
    marks: bytes = b""  # of its beginnings (`prefix_marks.py`)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Which prompts share cached KV with a call's: those with its salt and, with `by_key`, of its API key."""

    salt: bytes = b""
    by_key: bool = False

    def whole_salt(self, owner: bytes) -> bytes:
        """What keeps cached KV apart. `owner`: hash of an API key, or empty; a fixed length before the salt."""
        return (owner.ljust(1, b"-") + b"/" if self.by_key else b"") + self.salt


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A client's call: `n` answers to each prompt. Answer `p * n + k` is the k-th answer to prompt p.

    `scored_only`: the client asked for no tokens (max_tokens 0); generated tokens are not delivered. `spent_s`: seconds
    of `timeout_s` that have already passed.
    """

    id: str
    prompts: tuple[PromptPlan, ...]
    reply: ReplyOptions
    n: int = 1
    timeout_s: float | None = None
    wait_objective_s: float | None = None
    scored_only: bool = False
    spent_s: float = 0.0
    probe: bool = False  # a probe of this gateway (`pulse.py`), not a client's call: it is not counted
    priority: int = 0  # a lower number goes first among what waits
    offline: bool = False  # a line of a batch: no client waits, so its latencies are not counted
    internal_id: str = ""
    cache: CacheUse | None = None  # None: the cluster has no prefix cache
    session: str = ""  # the client's name of the conversation
    reading: Reading | None = None  # how answers are divided; None: their text is their content
    resume: tuple[Delivered, ...] = ()  # one entry for each answer if the call resumes an earlier call; else empty

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.n


@dataclass(slots=True)
class ServedModel:
    """The model that this gateway serves. `info` comes from the first worker that has read the model.
    `capacity_tokens` comes from the scheduler: the longest prefix length, in tokens, that the cluster can hold.
    """

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    info: ModelInfo | None = None
    capacity_tokens: int | None = None
    created: int = 0
    root: str = ""  # what the model is called where it comes from; "": its name here
    aliases: tuple[str, ...] = ()  # more names; * stands for any characters
    dialects: ModelDialects | None = None  # None: found by the chat template alone
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheUse | None = None  # of calls without a salt
    look_up: Callable[[CallPlan], Awaitable[CallPlan]] | None = None  # adds what is cached of a plan's prompts
    encoder: PromptEncoder | None = field(init=False, default=None)
    grammars: Grammars | None = field(init=False, default=None)  # made for the first request that needs them

    def __post_init__(self) -> None:
        self.created = self.created or int(time.time())
        if self.tokenizer is not None:
            self.encoder = PromptEncoder(self.tokenizer, self.template)
        if self.dialects is None:
            source = "" if self.template is None else self.template.source
            self.dialects = choose_dialects(AUTO, AUTO, chat_template=source, tokenizer=self.tokenizer)

    def is_called(self, name: str) -> bool:
        patterns = (".*".join(map(re.escape, alias.split("*"))) for alias in self.aliases)
        return name == self.name or any(re.fullmatch(pattern, name, re.DOTALL) for pattern in patterns)

    def require(self, name: str | None) -> ModelInfo:
        """The model's shape. Raises ModelNotFoundError for another model name, UnavailableError while the shape is
        unknown.
        """
        if name is not None and not self.is_called(name):
            raise ModelNotFoundError(f"model {name!r} does not exist; this server has {self.name!r}", param="model")
        if self.info is None:
            raise UnavailableError(f"model {self.name!r} is still loading")
        return self.info

    async def compiled(self, asked: tuple[GrammarSpec, str] | None) -> GrammarSpec | None:
        """A grammar that a field asks for, compiled. Raises InvalidRequestError, which names the field."""
        if asked is None:
            return None
        await self.compile(*asked)
        return asked[0]

    async def compile(self, spec: GrammarSpec, param: str) -> None:
        """Compiles a grammar that the field `param` asks for. Raises InvalidRequestError, which names it."""
        info = self.info
        assert info is not None
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: it has no structured output", param=param)
        try:
            if self.grammars is None:  # on another thread: the library is imported, which takes seconds
                self.grammars = await asyncio.to_thread(Grammars.of, self.tokenizer, info.vocab_size, self.engine)
            assert self.grammars is not None
            await self.grammars.ready(spec, info.eos_token_ids)
        except GrammarError as error:  # others may wait for the same error
            message = error.message.removeprefix(f"{spec.kind}: ")
            raise GrammarError(f"{param}: {message}", param=param) from None

    @property
    def beginning(self) -> int | None:
        """The token that the tokenizer, or the chat template, writes before a text; None if there is none."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.backend.token_to_id(self.tokenizer.special_tokens.get("bos_token", ""))

    @property
    def limit(self) -> tuple[int, str]:
        """The most tokens of prompt and answer together, and a description of what sets this limit."""
        assert self.info is not None
        if self.capacity_tokens is not None and self.capacity_tokens < self.info.max_positions:
            return self.capacity_tokens, f"the {self.capacity_tokens} tokens that this cluster can hold"
        return self.info.max_positions, f"the model's {self.info.max_positions} positions"


async def plan_completion(model: ServedModel, request: CompletionRequest, call_id: str = "") -> CallPlan:
    """Raises InvalidRequestError (or one of its kinds), ModelNotFoundError, UnavailableError, DeadlineError."""
    info = model.require(request.model)
    began_s = time.monotonic()
    _check_stops(model, request)
    grammar = await model.compiled(request.grammar_spec())
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    async with _within_limits(model, request, "prompt"):
        for prompt in request.prompts:
            if len(prompt) > most_tokens(request, model.limit[0]) and not isinstance(prompt, str):
                raise TooManyTokens(len(prompt))
        tokenised = iter(await _tokenised(model, request, texts))
    values = sampling_values(request, model, grammar)
    prompts = []
    for prompt in request.prompts:
        whole: Sequence[int] = next(tokenised) if isinstance(prompt, str) else prompt
        beginning = model.beginning if isinstance(prompt, str) else None
        tokens = truncated(request, whole, model.limit[0], DEFAULT_MAX_TOKENS, beginning)
        _check_tokens(tokens, info, "prompt")
        limit = _max_tokens(model, len(tokens), request.max_tokens, DEFAULT_MAX_TOKENS, "prompt")
        sampling = resolve_sampling(values, request, info, len(tokens), max(limit, 1))
        if request.echo and sampling.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=max(sampling.logprobs, sampling.prompt_logprobs or 0))
        if request.generated != request.n and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # to find the best
        text = prompt if isinstance(prompt, str) and len(tokens) == len(whole) else None
        prompts.append(PromptPlan(tuple(tokens), sampling, text))
    return await _call_plan("cmpl", call_id, model, tuple(prompts), request, began_s)


async def plan_chat(model: ServedModel, request: ChatRequest, call_id: str = "") -> CallPlan:
    """Raises InvalidRequestError (or one of its kinds), ModelNotFoundError, UnavailableError, DeadlineError."""
    info = model.require(request.model)
    began_s = time.monotonic()
    _check_stops(model, request)
    note_chat(request.messages)
    use = request.tool_use()
    async with _within_limits(model, request, "messages"):
        written, whole = await chat_tokens(model, request, most_tokens(request, model.limit[0]))
    most = model.limit[0]
    tokens = truncated(request, whole, most, max(1, min(CHAT_ANSWER, most // 4)), model.beginning)
    _check_tokens(tokens, info, "messages")
    wanted = request.max_tokens
    if request.fills_room and wanted is not None:
        wanted = min(wanted, max(1, most - len(tokens)))
    limit = _max_tokens(model, len(tokens), wanted, None, "messages")
    form = await chat_form(model, request, use, written.text)
    values = {**sampling_values(request, model, form.grammar), "thinking": form.thinking}
    sampling = resolve_sampling(values, request, info, len(tokens), limit)
    plan = await _call_plan(
        "chatcmpl", call_id, model, (PromptPlan(tuple(tokens), sampling, written.text),), request, began_s
    )
    return replace(plan, reading=form.reading)


async def chat_tokens(model: ServedModel, request: ChatRequest, most: int) -> tuple[Prompt, list[int]]:
    """The conversation as the template renders it, and its tokens, at most `most`.

    Raises InvalidRequestError (or one of its kinds), and TooManyTokens.
    """
    if model.encoder is None:
        raise InvalidRequestError("this model has no tokenizer: chat needs one; use /v1/completions with token ids")
    if model.template is None:
        raise InvalidRequestError("this model has no chat template: start the server with --chat-template FILE")
    turns = [message.turn for message in turns_for(model.template, request.messages)]
    variables, continued = request.variables(model.template), bool(request.continue_final_message)
    written = await _written(model.encoder, model.template, turns, variables, most, continued=continued)
    (tokens,) = await tokenise(model.encoder, [written], most, around=False)
    return written, tokens


async def _tokenised(model: ServedModel, request: CompletionRequest, texts: Sequence[str]) -> list[list[int]]:
    encoder = model.encoder
    if not texts:
        return []
    if encoder is None:
        raise InvalidRequestError("this model has no tokenizer: send the prompt as token ids", param="prompt")
    most = most_tokens(request, model.limit[0])
    prompts = [Prompt(text) for text in texts]
    if request.allow_special_tokens:
        for text in texts:
            check_size(encoder, text, most)
        look: Callable[[], list[Prompt]] = partial(list, map(partial(encoder.special_in, most=most + 1), texts))
        prompts = await in_turn(look) if sum(map(len, texts)) > LONG_TEXT else look()
    if request.suffix:
        prompts = with_suffix(model.tokenizer, encoder, prompts, request.suffix)
    return await tokenise(encoder, prompts, most, around=True)


async def _written(
    encoder: PromptEncoder,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    most: int,
    *,
    continued: bool,
) -> Prompt:
    """The conversation as the template renders it. Raises TooManyTokens for a long conversation whose size exceeds the
    limit, before its special tokens are searched for.
    """
    write = partial(encoder.of_begun_answer if continued else encoder.of_chat, template, messages, variables)

    def write_long() -> Prompt:
        check_size(encoder, template.render(messages, not continued, variables), most)
        return write()

    size = sum(_MESSAGE + sum(map(text_size, message.values())) for message in messages) + text_size(variables)
    return await in_turn(write_long) if size > LONG_TEXT else write()


@contextlib.asynccontextmanager
async def _within_limits(model: ServedModel, request: GenerationRequest, param: str) -> AsyncIterator[None]:
    """Encloses tokenisation: limits its time to `timeout_s`, and converts its errors to those that the client gets.

    Raises ContextLengthError, InvalidRequestError, DeadlineError.
    """
    try:
        async with asyncio.timeout(request.timeout_s):
            yield
    except TooManyTokens as too_many:
        limit, holder = model.limit
        known: dict[str, int] = {}
        if too_many.characters:
            has = f"{too_many.characters} characters, too many to tokenise under this limit"
        else:
            has = f"at least {too_many.least} tokens"
            known = {"tokens": too_many.least, "limit": limit - 1}
        message = f"{_TOO_LONG} {limit} tokens ({holder}); the prompt has {has}"
        raise ContextLengthError(message, param=param, **known) from None
    except InvalidRequestError as error:
        error.param = error.param or param
        raise
    except TimeoutError:
        raise DeadlineError(f"the request did not end within its timeout of {request.timeout_s:g} s") from None


def sampling_values(request: GenerationRequest, model: ServedModel, grammar: GrammarSpec | None) -> dict[str, Any]:
    """The arguments of SamplingParams that the request's prompts share: its options, and the model's defaults.

    Raises InvalidRequestError for a token id outside the vocabulary.
    """
    info = model.info
    assert info is not None
    check_vocabulary(request, info)
    return {**model_values(request, info, model.tokenizer), "grammar": grammar}


def resolve_sampling(
    values: Mapping[str, Any], request: GenerationRequest, info: ModelInfo, prompt_tokens: int, max_tokens: int
) -> SamplingParams:
    """`values`, completed for one prompt. Without a seed it gets a random one."""
    least = least_tokens(request, info.generation_defaults, prompt_tokens, max_tokens)
    own = {"seed": random.getrandbits(63), **values, "max_tokens": max_tokens, "min_tokens": least}
    return SamplingParams(**own)


def derive_seed(seed: int, number: int) -> int:
    """The seed of a prompt's `number`-th answer: `seed` itself for number 0, else a hash of both (splitmix64)."""
    if number == 0:
        return seed
    mixed = (seed + number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF  # splitmix64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


def _check_stops(model: ServedModel, request: GenerationRequest) -> None:
    if request.stop and model.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer: stop strings cannot be found", param="stop")


async def counted(model: ServedModel, request: ChatRequest, field: str) -> int:
    """The tokens of a conversation, tools included. Raises InvalidRequestError, which names `field`, if they are more
    than are counted at all.
    """
    most = max(MOST, model.limit[0])
    try:
        _, tokens = await chat_tokens(model, request, most)
    except TooManyTokens:
        message = f"{field}: too many tokens; at most {most} are counted"
        raise InvalidRequestError(message, param=field) from None
    return len(tokens)


def _check_tokens(tokens: Sequence[int], info: ModelInfo, param: str) -> None:
    if not tokens:
        raise InvalidRequestError(f"{param} must not be empty: it has no tokens", param=param)
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= info.vocab_size:
        token = low if low < 0 else high
        message = f"{param}: token id {token} is outside the vocabulary of {info.vocab_size}"
        raise InvalidRequestError(message, param=param)


def _max_tokens(model: ServedModel, prompt: int, wanted: int | None, default: int | None, param: str) -> int:
    """Tokens to generate: `wanted`; without it `default`, limited to the room that is left (`default` None: all of it).

    Raises ContextLengthError if the prompt and `wanted` tokens (without it: one token) exceed the limit.
    """
    limit, holder = model.limit
    left = limit - prompt
    if left < (1 if wanted is None else wanted):
        asked = f" and max_tokens is {wanted}" if wanted is not None else ", which leaves no room for an answer"
        message = f"{_TOO_LONG} {limit} tokens ({holder}); the prompt has {prompt} tokens{asked}"
        field = param if left < 1 or wanted is None else "max_tokens"
        raise ContextLengthError(message, param=field, tokens=prompt, limit=limit - 1)
    if wanted is not None:
        return wanted
    return left if default is None else min(default, left)


async def _call_plan(
    kind: str,
    call_id: str,
    model: ServedModel,
    prompts: tuple[PromptPlan, ...],
    request: GenerationRequest,
    began_s: float,
) -> CallPlan:
    unique = uuid.uuid4().hex
    cache = model.cache if model.cache is None else replace(model.cache, salt=(request.cache_salt or "").encode())
    plan = CallPlan(
        id=call_id or f"{kind}-{unique}",
        prompts=prompts,
        reply=request.reply,
        n=request.generated,
        timeout_s=request.timeout_s,
        spent_s=time.monotonic() - began_s,
        wait_objective_s=request.wait_objective_s,
        priority=request.priority or 0,
        scored_only=request.max_tokens == 0,
        cache=cache,
        session=request.session_id or "",
        # Clients may choose ids, and two clients may choose the same id. The cluster's internal ids stay unique.
        internal_id=f"{call_id}-{unique[:12]}" if call_id else f"{kind}-{unique}",
    )
    return plan if model.look_up is None else await model.look_up(plan)
