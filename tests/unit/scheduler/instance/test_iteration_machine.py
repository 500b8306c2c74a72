"""The iteration scheduler, of one cache or of ranks with a cache each, in any order of events."""

from __future__ import annotations

from support.iteration_machine import IterationMachine
from support.machines import machine_settings

TestIteration = IterationMachine.TestCase
TestIteration.settings = machine_settings(80, 50)
