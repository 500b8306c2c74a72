"""Starts `alignedserve serve` with fake roles."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.cluster.cli.serve_process import ServeProcess


class FakeServeProcess(ServeProcess):
    """`alignedserve serve` with roles that only join (`fake_roles`): Ray and Serve start, without a model."""

    @property
    def command(self) -> Sequence[str]:
        words = list(super().command)
        words[words.index("alignedserve.cluster.cli.main")] = "support.fake_serve"
        return words
