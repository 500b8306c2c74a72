"""Which running request is evicted when it has been evicted before."""

from support.iterations import Worker, names


def test_what_was_evicted_twice_is_spared_as_long_as_others_can_leave():
    worker = Worker(8)
    for name, tokens, evictions in ("a", 7, 2), ("b", 6, 1), ("c", 5, 0):
        worker.offer(name, tokens, most=30, evictions=evictions)
    evicted = []
    for _ in range(10):
        evicted += names(worker.step().evictions)
    assert evicted == ["b"]


def test_an_eviction_counts_when_its_copy_has_ended():
    worker = Worker(8)
    for name, tokens, evictions in ("a", 7, 1), ("b", 6, 0), ("c", 5, 0):
        worker.offer(name, tokens, most=30, evictions=evictions)
    evicted = []
    while not evicted:
        evicted += names(worker.step().evictions)
    worker.run(worker.plan(), finished="b")
    while len(evicted) < 2:
        evicted += names(worker.step().evictions)
    assert evicted == ["a", "c"]
