"""The channel of the tests of pairs: Gloo, or the one in the environment."""

from __future__ import annotations

import os

CHANNEL_VARIABLE = "ALIGNEDSERVE_TEST_PAIRS"
CHANNEL = os.environ.get(CHANNEL_VARIABLE, "gloo")
