"""What a machine can do is measured with real reads and products, however small."""

from benchmarks import roof_here


def test_it_reads_and_multiplies(monkeypatch):
    seconds = []
    monkeypatch.setattr(roof_here, "_shortest_s", lambda run: (run(), seconds.append(run), 0.5)[-1])
    roof = roof_here.measure_roof("float32", read_bytes=4000, size=10)
    assert len(seconds) == 2
    assert (roof.bytes_per_s, roof.flops_per_s) == (8000, 4000)


def test_the_shortest_time_counts(monkeypatch):
    times = iter([0.0, 3.0, 10.0, 11.0, 20.0, 25.0] + [30.0, 40.0] * (roof_here.NUM_TIMES - 3))
    monkeypatch.setattr(roof_here.time, "perf_counter", lambda: next(times))
    calls = []
    assert roof_here._shortest_s(lambda: calls.append(1)) == 1.0
    assert len(calls) == roof_here.NUM_TIMES
