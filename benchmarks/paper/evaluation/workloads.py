"""The workloads: the paper's synthetic mixes, applications from a folder of data, uniform lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from alignedserve.simulator.report.summary import Objectives
from alignedserve.simulator.traces import Trace, read_trace
from alignedserve.simulator.traces.mix import is_mix
from alignedserve.simulator.traces.trace import LengthsTrace, TimedTrace, in_order

SHARES = (0.70, 0.75, 0.80, 0.85, 0.90, 0.95)
CHAT = Objectives(ttft_s=2.0, tpot_s=0.1)
DOCUMENTS = Objectives(ttft_s=4.0, tpot_s=0.1)
VERY_LONG = Objectives(ttft_s=30.0, tpot_s=0.1)
MIX_REQUESTS = 1200
UNIFORM_REQUESTS = 600


@dataclass(frozen=True, slots=True)
class Source:
    """`text`: `mix:…` or a file. `requests`: number of requests in a run. `objectives`: for goodput."""

    name: str
    text: str
    requests: int
    objectives: Objectives = CHAT

    def trace(self, seed: int, at_once: bool) -> Trace:
        """The trace of a run. Each seed takes another window of a timed trace. `at_once`: drop the arrival times."""
        whole = _read(self.text)
        if not isinstance(whole, TimedTrace):
            return whole
        first = seed * self.requests % max(1, len(whole.rows) - self.requests + 1)
        rows, _ = in_order(list(whole.rows[first : first + self.requests]))
        if at_once:
            return LengthsTrace(whole.source, whole.format, whole.sha256, rows)
        return replace(whole, rows=rows)

    def sized(self, scale: float, limit: int | None) -> Source:
        """The source with `scale` times as many requests, at most `limit` and at most those of its file."""
        requests = max(1, round(self.requests * scale))
        if limit is not None:
            requests = min(limit, requests)
        if not is_mix(self.text):
            requests = min(requests, len(_read(self.text).rows))  # type: ignore[attr-defined]  # files have it
        text = self.text if requests <= self.requests or not is_mix(self.text) else f"{self.text},requests={requests}"
        return replace(self, requests=requests, text=text)

    def describe(self) -> dict[str, object]:
        """Everything but the seed that the lengths depend on. The path of a file is not included."""
        described = {name: value for name, value in _read(self.text).describe().items() if name != "source"}
        return {**described, "requests": self.requests}


@dataclass(frozen=True, slots=True)
class Application:
    """A file of the data folder. `stands_for`: the paper's workload that it replaces, if that is another."""

    name: str
    file: str
    requests: int
    objectives: Objectives
    stands_for: str = ""


SHAREGPT = Application("ShareGPT-8k", "lengths/sharegpt_8k_lengths.csv", 1200, CHAT)
ARXIV = Application(
    "arXiv summarization",
    "lengths/arxiv_summarization_4k_lengths.csv",
    1200,
    DOCUMENTS,
    "LongBench, of which no lengths were there",
)
AZURE_CODE = Application("Azure code", "traces/AzureLLMInferenceTrace_code.csv", 1200, CHAT)
AZURE_CONVERSATION = Application("Azure conversation", "traces/AzureLLMInferenceTrace_conv.csv", 1200, CHAT)
MOONCAKE = Application("Mooncake", "traces/mooncake_synthetic_trace.jsonl", 700, VERY_LONG)
APPLICATIONS = (SHAREGPT, ARXIV, AZURE_CODE, AZURE_CONVERSATION, MOONCAKE)


def mix(name: str, requests: int = MIX_REQUESTS, **keys: float) -> Source:
    """Uniform lengths: short prompts of 32 to 999, long ones of 1,000 to 8,000, answers of 64 to 512 tokens.

    `keys` change these.
    """
    text = ",".join(f"{key}={value:g}" for key, value in {**keys, "requests": requests}.items())
    return Source(name, f"mix:{text}", requests)


def mixes(shares: tuple[float, ...] = SHARES, requests: int = MIX_REQUESTS) -> list[Source]:
    return [mix(f"{round(100 * share)} % short", requests, short=share) for share in shares]


def uniform_lengths() -> list[Source]:
    """Prompts of nearly equal length, on which alignment has no gain and should cost little."""
    ends = {500: (480, 520), 2000: (1900, 2100)}
    return [
        mix(f"uniform, {mean}", UNIFORM_REQUESTS, short=1.0, short_min=low, short_max=high)
        for mean, (low, high) in ends.items()
    ]


def applications(folder: Path | None, wanted: tuple[Application, ...] = APPLICATIONS) -> tuple[list[Source], list[str]]:
    """The sources whose files are in `folder`, and a note for each missing one."""
    found, left_out = [], []
    for one in wanted:
        file = folder / one.file if folder else None
        if file is not None and file.is_file():
            found.append(Source(one.name, str(file), one.requests, one.objectives))
        else:
            why = f"no {one.file} in --data" if folder else "it needs --data DIR"
            left_out.append(f"{one.name} is left out: {why}")
    return found, left_out


def stand_ins(wanted: tuple[Application, ...] = APPLICATIONS) -> list[str]:
    return [f"{one.name} stands for {one.stands_for}" for one in wanted if one.stands_for]


@cache
def _read(text: str) -> Trace:
    return read_trace(text)
