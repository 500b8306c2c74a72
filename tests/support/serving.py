"""`alignedserve serve` with roles that only join."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.cluster.cli.serve_process import ServeProcess


class FakeServeProcess(ServeProcess):
    """The same with roles that only join (`fake_roles`): the start of Ray and Serve, and no model."""

    @property
    def command(self) -> Sequence[str]:
        words = list(super().command)
        words[words.index("alignedserve.cluster.cli.main")] = "support.fake_serve"
        return words
