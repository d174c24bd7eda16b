"""The offline loop against an engine whose answers and clock can be worked out by hand."""

from benchmarks.offline import run
from benchmarks.workloads import WorkItem
from dsjax.errors import invalid
from dsjax.request import FinishReason, SamplingParams, TokenEvent


class CountingEngine:
    """A step takes 1 s and gives each live request one token, the last one + 1. Refuses prompts that start with 0."""

    def __init__(self):
        self.now = 0.0
        self.live = {}
        self.most_live = 0
        self.salts = set()

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def add(self, request):
        if request.prompt_token_ids[0] == 0:
            raise invalid("prompt starts with 0")
        self.live[request.request_id] = [request, []]
        self.salts.add(request.cache_salt)

    def has_work(self):
        return bool(self.live)

    def wake_s(self):
        return None

    def step(self):
        self.now += 1.0
        self.most_live = max(self.most_live, len(self.live))
        events = []
        for name, (request, out) in list(self.live.items()):
            out.append((out or request.prompt_token_ids)[-1] + 1)
            done = len(out) == request.params.max_tokens
            if done:
                del self.live[name]
            events.append(
                TokenEvent(
                    request_id=name,
                    token_ids=(out[-1],),
                    finish_reason=FinishReason.LENGTH if done else None,
                    num_cached_tokens=2,
                )
            )
        return events


def measure(items, **kwargs):
    engine = CountingEngine()
    options = {"arrivals": [0.0] * len(items), "max_concurrency": None} | kwargs
    records, duration = run(
        engine,  # type: ignore[arg-type]
        items,
        params=lambda item: SamplingParams(max_tokens=item.max_tokens),
        clock=engine.clock,
        sleep=engine.sleep,
        **options,
    )
    return engine, records, duration


ITEMS = [WorkItem(id=10, prompt=(5,), max_tokens=2), WorkItem(id=11, prompt=(7, 8), max_tokens=3)]


def test_all_at_once():
    engine, records, duration = measure(ITEMS, cache_salt="s")
    assert [r.id for r in records] == [10, 11]
    assert [r.token_ids for r in records] == [[6, 7], [9, 10, 11]]
    assert [r.token_times_s for r in records] == [[1.0, 2.0], [1.0, 2.0, 3.0]]
    assert [r.prompt_len for r in records] == [1, 2]
    assert [r.cached_tokens for r in records] == [2, 2]
    assert (duration, engine.most_live, engine.salts) == (3.0, 2, {"s"})


def test_max_concurrency_starts_the_clock_when_sent():
    engine, records, duration = measure(ITEMS, max_concurrency=1)
    assert [r.start_s for r in records] == [0.0, 2.0]
    assert [r.ttft_s for r in records] == [1.0, 1.0]
    assert (duration, engine.most_live) == (5.0, 1)


def test_arrivals_are_waited_for():
    _, records, duration = measure(ITEMS, arrivals=[0.0, 4.5])
    assert [r.start_s for r in records] == [0.0, 4.5]
    assert records[1].token_times_s == [5.5, 6.5, 7.5]
    assert duration == 7.5


def test_a_refusal_is_recorded_and_the_rest_goes_on():
    finished = []
    items = [WorkItem(id=0, prompt=(0,), max_tokens=1), *ITEMS]
    _, records, _ = measure(items, on_finish=lambda: finished.append(1))
    assert records[0].error == "INVALID_ARGUMENT: prompt starts with 0"
    assert [r.ok for r in records] == [False, True, True]
    assert len(finished) == 3
