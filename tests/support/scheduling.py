"""Which tests share a process when pytest runs with `-n`."""

from xdist.scheduler import LoadScopeScheduling

WITH_RAY = ("tests/chaos/", "tests/cluster/")


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A file's tests share a process. All tests that start Ray share one too: there is one Ray cluster at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if nodeid.startswith(WITH_RAY) else nodeid.partition("::")[0]
