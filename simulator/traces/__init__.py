"""Traces: arrival times and token counts of requests. `read_trace` detects a file's format from its content."""

from alignedserve.simulator.traces.load import Load
from alignedserve.simulator.traces.mix import Mix, is_mix
from alignedserve.simulator.traces.read import read_trace
from alignedserve.simulator.traces.trace import LengthsTrace, TimedTrace, Trace

__all__ = ["LengthsTrace", "Load", "Mix", "TimedTrace", "Trace", "is_mix", "read_trace"]
