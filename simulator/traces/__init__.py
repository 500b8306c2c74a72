"""Traces: who arrives when, with how many tokens. `read_trace` knows a file's format by its content."""

from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.mix import Mix, is_mix
from alignedserve.simulator.traces.read import read_trace
from alignedserve.simulator.traces.trace import LengthsTrace, TimedTrace, Trace

__all__ = ["LengthsTrace", "Load", "Mix", "TimedTrace", "Trace", "is_mix", "read_trace"]
