"""What is prefetched from disk reaches the device of an engine that is idle."""

from concurrent.futures import Executor, Future

from dsjax.cache.disk import Disk
from dsjax.cache.tiers import Tiers
from tests.fakes import drain, request, tokens_of
from tests.tiny_model import random_prompt, solo, tiny_engine


class ByHand(Executor):
    """Does what it was given when told to."""

    def __init__(self):
        self.todo: list[tuple[Future, object, tuple]] = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.todo.append((future, fn, args))
        return future

    def work(self) -> None:
        for future, function, args in self.todo:
            future.set_result(function(*args))  # type: ignore[operator]
        self.todo.clear()


class AtOnce(ByHand):
    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        self.work()
        return future


def test_an_idle_engine_wakes_until_a_prefetched_file_is_on_the_device(tmp_path):
    def engine(reader: Executor):
        return tiny_engine(
            cache={"num_snapshots": 2}, tiers=Tiers(1 << 24, Disk(tmp_path, 1 << 26, "m", reader, AtOnce()))
        )

    def answer(prompt):
        made.add(request("one", prompt, max_tokens=6))
        events = drain(made)["one"]
        return tokens_of(events), events[-1].num_cached_tokens

    prompt = random_prompt(5, 24)
    made = engine(AtOnce())
    tokens, _ = answer(prompt)
    made.close()
    reader = ByHand()
    made = engine(reader)
    turn = [*prompt, *tokens, 5, 6]
    assert made.wake_s() is None
    assert made.prefetch(token_ids=turn)
    assert made.wake_s() is not None and not made.has_work()
    assert made.step() == [] and made.wake_s() is not None
    reader.work()
    assert made.step() == [] and made.wake_s() is None
    stats = made.stats()
    assert (stats.num_tier_hits, stats.num_tier_loads) == (1, 1)
    assert answer(turn) == (solo(turn, 6), 29)
    assert made.stats().num_tier_hits == 1  # it was on the device
    made.close()
