"""Chooses the next token of each row of a batch, and reports log-probabilities.

Order, for each row: logit_bias, repetition penalty, presence and frequency penalty, min_tokens, excluded tokens, the
grammar's mask, then greedy choice, or temperature, top_k, top_p, min_p and a draw, unless a spent budget of reasoning
forces the token. Reported log-probabilities are the model's own (log_softmax of its logits, before all of this).

A draw takes the largest `logit - log(noise)` (the Gumbel-max trick), with noise that is a hash of (seed, position in
the answer, token id). It depends neither on the batch nor on the other candidates. If rounding changes a logit, two
rows can differ only between tokens whose scores are within that rounding. Filters keep all tokens that tie with the
last one kept, so that they do not depend on the order of a sort either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from alignedserve.engine.sampling.exclusions import Exclusions, excluded_beginning, excludes_always
from alignedserve.engine.sampling.masks import apply_masks
from alignedserve.engine.sampling.noise import exponential_noise, row_keys
from alignedserve.engine.sampling.penalties import PenaltyState, needs_penalties
from alignedserve.errors import GrammarError, InvalidRequestError, NumericsError
from alignedserve.grammar.base import Bits
from alignedserve.grammar.rows import RowGrammar, fill_each, fill_rows
from alignedserve.request import SamplingParams, TokenLogprobs

_CANDIDATES = 512  # for top_p alone, at first
_TIES = 8  # beyond top_k
_CACHED_ELEMENTS = 1 << 16
LOWEST_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SampleRow:
    """One request as the sampler sees it. Keep the object (and its lists) while the request decodes.

    `output_token_ids` are the tokens chosen so far; their number is the position in the answer of the token to be
    chosen. `penalties` is created when first needed. `grammar`: its state under a grammar, which follows the output.
    `exclusions`: None if no option excludes tokens.
    """

    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    penalties: PenaltyState | None = None
    grammar: RowGrammar | None = None
    exclusions: Exclusions | None = field(init=False, default=None)
    _always: bool = field(init=False)  # these two: whether it adjusts, apart from the grammar
    _until: int = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.sampling
        excludes, beginning = excludes_always(sampling), excluded_beginning(sampling)
        if excludes or beginning:
            self.exclusions = Exclusions(sampling, self.prompt_token_ids)
        self._always = excludes or bool(sampling.logit_bias) or needs_penalties(sampling)
        self._until = max(sampling.min_tokens, beginning)

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before the token is chosen."""
        chosen, thinking = len(self.output_token_ids), self.sampling.thinking
        limited = thinking is not None and thinking.near(chosen)
        return self._always or limited or self.grammar is not None or chosen < self._until

    @property
    def masked(self) -> bool:
        """Whether a grammar's mask is all that changes the logits: its choice waits for the mask, on the device."""
        sampling = self.sampling
        plain = not self._always and self.exclusions is None and sampling.logprobs is None and sampling.thinking is None
        return self.grammar is not None and plain

    @property
    def needs_host(self) -> bool:
        """Whether its token is chosen on the host, once the last one is known there."""
        if self.grammar is None:
            return self.sampling.logprobs is not None or self.adjusts
        return not self.masked


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Stateless except for the `SampleRow`s it is given; one instance serves any number of threads."""

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int] | None = None
    ) -> list[SampledToken]:
        """One token for each row of `logits`, fp32 `[rows, vocab_size]`, which is not changed.

        `positions`: each token's place in its answer, if that is not the length of the row's known output. Raises
        NumericsError, naming the rows, if logits are NaN or +inf (or all -inf), from which no meaningful token can be
        chosen.
        """
        if not rows:
            return []
        top, best = logits.max(dim=-1)
        _require_finite(top)
        special = [i for i, row in enumerate(rows) if not row.sampling.greedy or row.adjusts]
        chosen = best.tolist()
        if special:
            places = _places(rows, positions)
            tokens = _choose(_take(logits, special), [rows[i] for i in special], [places[i] for i in special])
            for index, token in zip(special, tokens, strict=True):
                chosen[index] = token
        reported = _report(logits, rows, chosen)
        return [SampledToken(token, reported.get(i)) for i, token in enumerate(chosen)]

    @torch.inference_mode()
    def choose(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sample`, left on the device: tokens int64 `[rows]`, and bool `[rows]`, False if logits are not finite.

        For rows without adjustments and log-probabilities. A token of logits that are not finite is meaningless, but in
        the vocabulary. The host waits for the device only if a row has top_k or top_p.
        """
        top, tokens = logits.max(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
        if drawn:
            chosen = _draw(_take(logits, drawn), [rows[i] for i in drawn], [positions[i] for i in drawn])
            tokens.index_copy_(0, upload(drawn, logits.device), chosen)
        return tokens, torch.isfinite(top)

    @torch.inference_mode()
    def choose_masked(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, GrammarError]]:
        """As `choose`, for rows that are `masked` and whose output is complete; masks are filled before anything waits.

        A row whose grammar cannot go on has an error, by its index, and a meaningless token.
        """
        grammars = [row.grammar for row in rows if row.grammar is not None]
        bits, errors = fill_each(grammars, [row.output_token_ids for row in rows], logits.shape[1])
        own = logits.clone()
        apply_masks(own, bits)
        tokens = own.argmax(dim=-1)
        drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
        if drawn:
            chosen = _draw(_take(own, drawn), [rows[i] for i in drawn], [positions[i] for i in drawn])
            tokens.index_copy_(0, upload(drawn, logits.device), chosen)
        return tokens, torch.isfinite(logits.amax(dim=-1)), errors

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
        """Log-probabilities and ranks of `next_token_ids`, one for each row of `logits` `[rows, vocab_size]`, and the
        top `k`.
        """
        if not len(next_token_ids):
            return []
        _require_finite(logits.amax(dim=-1))
        own = logits.gather(1, upload(next_token_ids, logits.device)[:, None])
        ranks = (logits >= own).sum(dim=-1).tolist()
        found = _logprobs(logits, list(next_token_ids), [k] * len(next_token_ids))
        return [replace(entry, rank=rank) for entry, rank in zip(found, ranks, strict=True)]


def upload(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """`values` on `device`, without waiting for its pending work."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _places(rows: Sequence[SampleRow], positions: Sequence[int] | None) -> Sequence[int]:
    return [len(row.output_token_ids) for row in rows] if positions is None else positions


def _require_finite(top: torch.Tensor) -> None:
    """`top` is each row's maximum, which is NaN if the row contains one, so checking it suffices."""
    finite = torch.isfinite(top)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise NumericsError(f"the model computed NaN or infinite logits for {len(bad)} of {len(top)} rows", rows=bad)


def _take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]`; the tensor itself, not a copy, if that is all of it."""
    if rows == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, upload(rows, tensor.device))


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int]) -> list[int]:
    """Tokens for rows that need more than an argmax."""
    if any(row.adjusts for row in rows):
        logits = logits.clone()
        masked = [index for index, row in enumerate(rows) if row.grammar is not None]
        masks = _masks([rows[index] for index in masked], logits.shape[1])  # before the logits are waited for
        for index, row in enumerate(rows):
            if row.adjusts and not row.masked:
                _adjust(logits[index], row)
        if masks is not None:
            own = _take(logits, masked)
            apply_masks(own, masks)
            if own is not logits:
                logits.index_copy_(0, upload(masked, logits.device), own)
        _require_a_token(logits, rows)
    greedy = [i for i, row in enumerate(rows) if row.sampling.greedy]
    drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    chosen = [0] * len(rows)
    if greedy:
        for index, token in zip(greedy, _take(logits, greedy).argmax(dim=-1).tolist(), strict=True):
            chosen[index] = token
    if drawn:
        tokens = _draw(_take(logits, drawn), [rows[i] for i in drawn], [positions[i] for i in drawn])
        for index, token in zip(drawn, tokens.tolist(), strict=True):
            chosen[index] = token
    for index, row in enumerate(rows):
        if (
            row.sampling.thinking is not None
            and (token := row.sampling.thinking.forced(row.output_token_ids)) is not None
        ):
            chosen[index] = token
    return chosen


def _adjust(logits: torch.Tensor, row: SampleRow) -> None:
    """Apply bias, penalties, min_tokens and exclusions to one row `[vocab_size]` in place."""
    sampling = row.sampling
    vocab_size = logits.shape[0]
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        index = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        logits.index_add_(0, index, torch.tensor(biases, dtype=torch.float32, device=logits.device))
    if needs_penalties(sampling):
        if row.penalties is None:
            row.penalties = PenaltyState(row.prompt_token_ids)
        row.penalties.update(row.output_token_ids)
        row.penalties.apply(logits, sampling)
    if len(row.output_token_ids) < sampling.min_tokens and row.grammar is None:
        ends = [token for token in (*sampling.eos_token_ids, *sampling.stop_token_ids) if 0 <= token < vocab_size]
        if ends:
            logits[torch.tensor(ends, dtype=torch.int64, device=logits.device)] = float("-inf")
    if row.exclusions is not None:
        row.exclusions.apply(logits, row.output_token_ids, forces=row.grammar is None)


def _require_a_token(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Raises InvalidRequestError if the options of a row exclude every token."""
    excluding = [index for index, row in enumerate(rows) if row.exclusions is not None]
    empty = torch.isneginf(_take(logits, excluding).amax(dim=-1)).tolist() if excluding else ()
    for index, nothing in zip(excluding, empty, strict=True):
        if nothing:
            what = "all of them" if rows[index].grammar is None else "all that its grammar allows"
            message = f"no token may follow: the request's options (allowed_token_ids, bad_words, …) exclude {what}"
            raise InvalidRequestError(message)


def _masks(rows: Sequence[SampleRow], vocab_size: int) -> Bits | None:
    """What the grammars of these rows, which all have one, allow next, `[rows, words]`; None without rows."""
    grammars = [row.grammar for row in rows if row.grammar is not None]
    return fill_rows(grammars, [row.output_token_ids for row in rows], vocab_size) if grammars else None


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow], positions: Sequence[int]) -> torch.Tensor:
    """One drawn token for each row, `[rows]`."""
    device = logits.device
    sampling = [row.sampling for row in rows]
    temperature = upload([max(s.temperature, LOWEST_TEMPERATURE) for s in sampling], device, torch.float32)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    keys = upload([row_keys(s.seed, place) for s, place in zip(sampling, positions, strict=True)], device, torch.int32)
    lowest_likely = [math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in sampling]
    threshold = upload(lowest_likely, device, torch.float32)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    vocab_size = logits.shape[1]
    ranked = [i for i, s in enumerate(sampling) if 0 < s.top_k < vocab_size or s.top_p < 1.0]
    whole = sorted(set(range(len(rows))) - set(ranked))
    if ranked:
        index = upload(ranked, device)
        lowest, picked, complete = _draw_ranked(
            _take(scaled, ranked), [sampling[i] for i in ranked], threshold[index], keys[index]
        )
        tokens[index] = picked
        threshold[index] = lowest
        whole += [row for row, done in zip(ranked, complete.tolist(), strict=True) if not done]
    if whole:
        index = upload(whole, device)
        tokens[index] = _draw_whole(_take(scaled, whole), threshold[index], keys[index])
    return tokens


def _draw_whole(scaled: torch.Tensor, threshold: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw from each row's tokens that reach its threshold, a few rows at a time, which stay in the CPU's cache."""
    rows, vocab_size = scaled.shape
    ids = torch.arange(vocab_size, dtype=torch.int32, device=scaled.device).unsqueeze(0)
    step = max(1, _CACHED_ELEMENTS // vocab_size) if scaled.device.type == "cpu" else rows
    tokens = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        scores = exponential_noise(keys[part], ids).log_().neg_().add_(scaled[part])
        scores.masked_fill_(scaled[part] < threshold[part, None], -math.inf)
        torch.argmax(scores, dim=-1, out=tokens[part])
    return tokens


def _draw_ranked(
    scaled: torch.Tensor, sampling: Sequence[SamplingParams], threshold: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw under top_k and top_p, looking at the most likely tokens only.

    Returns each row's threshold, its token, and whether the candidates contained all tokens that reach the threshold.
    If not, the token is invalid and the row must be drawn from the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    top_k = torch.tensor([s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in sampling], device=scaled.device)
    top_p = torch.tensor([s.top_p for s in sampling], device=scaled.device, dtype=torch.float64)
    looked_at = [s.top_k + _TIES if 0 < s.top_k < vocab_size else _CANDIDATES for s in sampling]
    count = min(vocab_size, max(looked_at))
    values, ids = scaled.topk(count, dim=-1)
    lowest, short = _lowest_kept(scaled, values, top_k, top_p)
    while count < vocab_size and bool(short.any()):
        count = min(vocab_size, 8 * count)
        more = scaled[short].topk(count, dim=-1).values
        lowest[short], still = _lowest_kept(scaled[short], more, top_k[short], top_p[short])
        short[short.clone()] = still
    threshold = torch.maximum(threshold, lowest)
    scores = values - exponential_noise(keys, ids.to(torch.int32)).log_()
    best = scores.masked_fill_(values < threshold[:, None], -math.inf).argmax(dim=-1, keepdim=True)
    complete = (values[:, -1] < threshold) | (values.shape[1] == vocab_size)
    return threshold, ids.gather(1, best)[:, 0], complete


def _lowest_kept(
    scaled: torch.Tensor, values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest value that top_k, then top_p (of the rest) keep, from the highest `values`, descending.

    Also returns which rows would have kept more than `values` contains.
    """
    count, vocab_size = values.shape[1], scaled.shape[1]
    rank = torch.arange(count, device=values.device)
    within = rank < top_k[:, None]
    weights = values.double().exp_().masked_fill_(~within, 0.0)
    total = torch.where(top_k < vocab_size, weights.sum(-1), scaled.logsumexp(-1).double().exp_())
    kept = within & (weights.cumsum(-1) - weights < (top_p * total)[:, None])
    last = kept.sum(-1).clamp_(min=1) - 1
    short = kept[:, -1] & (top_k > count)
    return values.gather(1, last[:, None])[:, 0], short


def _report(logits: torch.Tensor, rows: Sequence[SampleRow], chosen: Sequence[int]) -> dict[int, TokenLogprobs]:
    wanted = [(i, row.sampling.logprobs) for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return {}
    indices = [i for i, _ in wanted]
    asked = [rows[i].sampling.logprob_token_ids for i in indices]
    found = _logprobs(_take(logits, indices), [chosen[i] for i in indices], [k or 0 for _, k in wanted], asked)
    return dict(zip(indices, found, strict=True))


def _logprobs(
    logits: torch.Tensor, tokens: list[int], counts: list[int], asked: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Of each row's token and of its most likely ones, or of those that are `asked` for in their place."""
    normalised = torch.log_softmax(logits.float(), dim=-1)
    if any(asked):
        about = zip(normalised, tokens, counts, asked, strict=True)
        return [_listed(row, token, count, listed) for row, token, count, listed in about]
    return _ranked(normalised, tokens, counts)


def _listed(normalised: torch.Tensor, token: int, count: int, asked: Sequence[int]) -> TokenLogprobs:
    if not asked:
        return _ranked(normalised[None], [token], [count])[0]
    index = torch.tensor([token, *asked], dtype=torch.int64, device=normalised.device)
    own, *others = normalised[index].tolist()
    return TokenLogprobs(own, tuple(zip(asked, others, strict=True)))


def _ranked(normalised: torch.Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    index = torch.tensor(tokens, dtype=torch.int64, device=normalised.device)
    own = normalised.gather(1, index[:, None])[:, 0].tolist()
    most = min(max(counts), normalised.shape[1])
    if most == 0:
        return [TokenLogprobs(value) for value in own]
    values, ids = normalised.topk(most, dim=-1)
    return [
        TokenLogprobs(value, tuple(zip(row_ids[:count], row_values[:count], strict=True)))
        for value, row_ids, row_values, count in zip(own, ids.tolist(), values.tolist(), counts, strict=True)
    ]
