"""`alignedserve` with roles that only join: `python -m support.fake_serve serve …`."""

from __future__ import annotations

import sys
from typing import Any

from alignedserve.cluster.cli import main as cli


def main() -> int:
    from alignedserve.cluster.serve.ray_session import RaySession

    RaySession.build = staticmethod(_build)  # type: ignore[method-assign]
    return cli.main()


def _build(tree: dict[str, Any]) -> Any:
    from support.fake_application import build

    return build(tree)


if __name__ == "__main__":
    sys.exit(main())
