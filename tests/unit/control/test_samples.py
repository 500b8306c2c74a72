"""Metrics of many processes as one page of Prometheus text, and samples out of it."""

from __future__ import annotations

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.control.samples import by_instance, merge, samples, value, with_label
from alignedserve.metrics import Histogram, Page


def page_of(instance: str, *waits_s: float, meaning: str = "blocks by state") -> str:
    waits, page = Histogram((0.5, 2.0)), Page(instance=instance)
    for wait_s in waits_s:
        waits.observe(wait_s)
    page.gauge("blocks", meaning, 3, store=f'{instance}/"a"\\')
    page.gauge("blocks", meaning, 4.5, store=f"{instance}/b")
    page.histogram("wait_seconds", "how long\nthey wait", waits)
    return page.text()


def families(page: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_a_metric_of_several_processes_comes_once_with_all_samples() -> None:
    own = Page()
    own.counter("starts_total", "processes started", 7)
    pages = [page_of("p0", 0.25, 9.0), page_of("p1", meaning="blocks, said otherwise"), own.text()]
    page = merge([*pages, pages[0]])
    assert page.count("# HELP") == page.count("# TYPE") == 3
    merged, apart = families(page), [families(one) for one in pages]
    assert {name: (family.type, family.documentation) for name, family in merged.items()} == {
        "alignedserve_blocks": ("gauge", "blocks by state"),
        "alignedserve_wait_seconds": ("histogram", "how long\nthey wait"),
        "alignedserve_starts": ("counter", "processes started"),
    }
    for name, family in merged.items():
        assert family.samples == [sample for one in apart if name in one for sample in one[name].samples]


def test_nothing_makes_an_empty_page_and_a_metric_without_samples_is_left_out() -> None:
    assert merge(["", "\n", "# HELP a b\n# TYPE a gauge\n"]) == ""


def test_one_more_label_on_every_sample() -> None:
    page = merge([page_of("p0", 1.0), "# HELP a b {c}\n# TYPE a counter\na_total 3.0\n"])
    labelled = families(with_label(page, "application", "chat"))
    for name, family in families(page).items():
        assert labelled[name].documentation == family.documentation
        told = [sample._replace(labels={"application": "chat", **sample.labels}) for sample in family.samples]
        assert labelled[name].samples == told


def test_samples_are_found_by_name_and_labels() -> None:
    page = merge([page_of("p0", 1.0), page_of("p1")])
    assert value(page, "alignedserve_blocks") == 15.0
    assert value(page, "alignedserve_blocks", store='p0/"a"\\') == 3.0
    assert value(page, "alignedserve_blocks", instance="p1", store="p1/b") == 4.5
    assert value(page, "alignedserve_wait_seconds_bucket", le="2.0") == 1.0
    assert value(page, "alignedserve") == 0.0
    assert by_instance(page, "alignedserve_blocks") == {"p0": 7.5, "p1": 7.5}
    assert len([*samples(page, "alignedserve_wait_seconds_sum", "alignedserve_wait_seconds_count")]) == 4


def test_a_value_on_a_bound_counts_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for seen in (1.0, 1.5, 2.0, 9.0):
        histogram.observe(seen)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 13.5
