"""State of a batch of requests, without I/O: the next item, the outcomes in order, the progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, TypeAlias, TypeVar

from alignedserve.client.calls import Call
from alignedserve.client.options import Options, Progress
from alignedserve.client.types import Completion
from alignedserve.errors import AlignedServeError, BatchError, ConfigError, InvalidRequestError

DEFAULT_CONCURRENCY = 32
Outcome: TypeAlias = Completion | AlignedServeError
Item = TypeVar("Item")


class Batch(Generic[Item]):
    """While it `wants_more`, `add` an item and run the call that is returned. `end` each call, then get `results`."""

    def __init__(
        self,
        items: object,
        plan: Callable[[Item, Options], Call[Completion]],
        options: Options,
        concurrency: int,
        progress: Progress,
        return_exceptions: bool,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            message = f"concurrency must be an integer of at least 1, got {concurrency!r}"
            raise InvalidRequestError(message, param="concurrency")
        if isinstance(items, str | bytes | Mapping):
            kind = "request" if isinstance(items, Mapping) else "string"
            raise InvalidRequestError(f"a batch is an iterable of prompts, not one {kind}", param="prompts")
        if options.get("request_id") is not None:
            message = "request_id must be unique: give each request a dict with its own request_id"
            raise InvalidRequestError(message, param="request_id")
        self._plan = plan
        self._options = options
        self._concurrency = concurrency
        self._return_exceptions = return_exceptions
        self._outcomes: dict[int, Outcome] = {}
        self._taken = 0
        self._first_error: AlignedServeError | None = None
        self._meter = _open_meter(progress, len(items) if isinstance(items, Sized) else None)

    @property
    def open(self) -> int:
        """Number of items that were taken and have not ended."""
        return self._taken - len(self._outcomes)

    @property
    def wants_more(self) -> bool:
        """Whether another item can be taken now: there is room, and no request has failed."""
        failed = self._first_error is not None and not self._return_exceptions
        return self.open < self._concurrency and not failed

    def add(self, item: Item) -> tuple[int, Call[Completion]] | None:
        """The number of the item and its call. None for an invalid item, which has ended with its error."""
        number = self._taken
        self._taken += 1
        try:
            return number, self._plan(item, self._options)
        except AlignedServeError as error:
            self.end(number, error)
            return None

    def end(self, number: int, outcome: Outcome) -> None:
        """Note how the call of this number ended."""
        self._outcomes[number] = outcome
        if isinstance(outcome, AlignedServeError) and self._first_error is None:
            self._first_error = outcome
        self._meter.advance(outcome)

    def results(self) -> list[Outcome]:
        """The outcomes in the order of the items. Raises BatchError if one failed, unless errors were requested."""
        results = [self._outcomes[number] for number in range(self._taken)]
        if self._first_error is None or self._return_exceptions:
            return results
        failed = sum(isinstance(outcome, AlignedServeError) for outcome in results)
        message = f"{failed} of {len(results)} requests failed, the first with: {self._first_error.message}"
        raise BatchError(message, results=results, code=self._first_error.code) from self._first_error

    def close(self) -> None:
        """Close the progress bar."""
        self._meter.close()


class _Meter:
    """Progress that is not shown."""

    def advance(self, outcome: Outcome) -> None:
        pass

    def close(self) -> None:
        pass


def load_bar() -> Any:
    """The class of tqdm's bars. Raises ConfigError without tqdm."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        message = "progress=True needs tqdm: pip install tqdm (or give a function of (done, total))"
        raise ConfigError(message) from error
    return tqdm


class _Bar(_Meter):
    """A tqdm bar with the generated tokens and the failed requests."""

    def __init__(self, total: int | None) -> None:
        self._bar: Any = load_bar()(total=total, unit="req", dynamic_ncols=True)
        self._tokens = 0
        self._failed = 0

    def advance(self, outcome: Outcome) -> None:
        if isinstance(outcome, Completion):
            self._tokens += outcome.usage.completion_tokens
        else:
            self._failed += 1
        failed = {"failed": self._failed} if self._failed else {}
        self._bar.set_postfix(tokens=self._tokens, **failed, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class _Reported(_Meter):
    """Calls the user's function."""

    def __init__(self, report: Callable[[int, int | None], object], total: int | None) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def advance(self, outcome: Outcome) -> None:
        self._done += 1
        self._report(self._done, self._total)


def _open_meter(progress: Progress, total: int | None) -> _Meter:
    if callable(progress):
        return _Reported(progress, total)
    return _Bar(total) if progress else _Meter()


def checked_items(items: Iterable[Item]) -> Iterator[Item]:
    """An iterator over the items. Raises InvalidRequestError if they are not iterable."""
    try:
        return iter(items)
    except TypeError as error:
        raise InvalidRequestError(f"a batch is an iterable of prompts: {error}", param="prompts") from error
