"""A deploy whose cluster a node could not hold is refused while the running one still serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.launch import vetting
from alignedserve.config_sources import from_tree
from alignedserve.errors import ResourceError
from alignedserve.sizing import RANK_BYTES
from alignedserve.testing.models import make_model

TOTAL = 4 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("model"), seed=1)


@pytest.mark.parametrize(
    ("degrees", "alone", "refused"),
    [
        ({"decode": {"tensor_parallel": 2}}, True, False),
        ({"decode": {"tensor_parallel": 4}, "prefill": {"pipeline_parallel": 3}, "cluster": {"decode": 4}}, True, True),
        ({"decode": {"tensor_parallel": 4}, "cluster": {"decode": 4}}, False, False),  # there are other nodes for them
    ],
)
def test_more_ranks_than_the_only_node_has_memory_for(
    degrees: dict[str, Any], alone: bool, refused: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vetting, "total_memory_bytes", lambda: TOTAL)
    assert 12 * RANK_BYTES < TOTAL < 14 * RANK_BYTES
    config = from_tree({"model": {"path": str(folder)}, "kv_pool": {"size_gib": 0.2}, **degrees})
    if refused:
        with pytest.raises(ResourceError, match="GiB"):
            vetting.vet_node(config, "cpu", alone)
    else:
        vetting.vet_node(config, "cpu", alone)
