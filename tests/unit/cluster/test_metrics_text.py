"""Many processes' Prometheus text as one page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.cluster.supervisor.metrics_text import merge, with_label

ONE = """# HELP blocks Blocks by state.
# TYPE blocks gauge
blocks{store="a"} 1
# TYPE wait_seconds histogram
wait_seconds_bucket{role="a",le="+Inf"} 2
wait_seconds_sum{role="a"} 0.5
wait_seconds_count{role="a"} 2
"""
TWO = """# HELP blocks Blocks, said otherwise.
# TYPE blocks gauge
blocks{store="b"} 3
# TYPE wait_seconds histogram
wait_seconds_bucket{role="b",le="+Inf"} 1
wait_seconds_sum{role="b"} 0.25
wait_seconds_count{role="b"} 1
plain 7
"""


def test_a_family_that_several_processes_have_comes_once_with_all_samples() -> None:
    page = merge([ONE, TWO, ONE])
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert page.count("# TYPE blocks ") == 1
    assert {(s.labels["store"], s.value) for s in families["blocks"].samples} == {("a", 1.0), ("b", 3.0)}
    assert len(families["wait_seconds"].samples) == 6
    assert families["plain"].samples[0].value == 7.0


def test_nothing_makes_an_empty_page() -> None:
    assert merge(["", "\n"]) == ""


def test_what_comes_without_a_type_gets_it_from_its_name() -> None:
    page = merge(['alignedserve_things_total{instance="a"} 1\nalignedserve_kv_blocks{instance="a"} 2\nother 3\n'])
    assert page.splitlines() == [
        "# TYPE alignedserve_things_total counter",
        'alignedserve_things_total{instance="a"} 1',
        "# TYPE alignedserve_kv_blocks gauge",
        'alignedserve_kv_blocks{instance="a"} 2',
        "other 3",
    ]


def test_one_more_label_on_every_sample() -> None:
    page = '# TYPE a counter\na_total 3\nb{role="x"} 1.5\n'
    assert with_label(page, "application", "chat") == (
        '# TYPE a counter\na_total{application="chat"} 3\nb{application="chat",role="x"} 1.5\n'
    )
