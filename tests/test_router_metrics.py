"""The router's own kind of metric, beside the library's."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdmesh.router.metrics import TokenHistogram

BOUNDS = (0.001, 0.25, 1, 2.5)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.1, 0.25, 1, 2, 3]), st.integers(1, 9))))
def test_a_histogram_of_tokens_shows_what_one_of_single_values_does(seen):
    ours, theirs = TokenHistogram("itl", "Text.", BOUNDS), CollectorRegistry()
    single = Histogram("itl", "Text.", buckets=BOUNDS, registry=theirs)
    registry = CollectorRegistry()
    registry.register(ours)
    for value, count in seen:
        ours.observe(value, count)
        for _ in range(count):
            single.observe(value)
    for name in ("itl_count", *(f"itl_bucket {bound}" for bound in (*map(float, BOUNDS), "+Inf"))):
        sample, _, bound = name.partition(" ")
        labels = {"le": str(bound)} if bound else {}
        value = registry.get_sample_value(sample, labels)
        assert value == theirs.get_sample_value(sample, labels) is not None, name
    total = registry.get_sample_value("itl_sum")
    assert abs(total - theirs.get_sample_value("itl_sum")) < 1e-6
    assert generate_latest(registry).startswith(b"# HELP itl Text.\n# TYPE itl histogram\n")
