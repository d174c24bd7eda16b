"""What an engine step costs on the host, by part, with no device: the real scheduler, cache, packing and text.

    python -m benchmarks.host
    python -m benchmarks.host --num_running=64 --num_steps=500 --output=host.jsonl
    python -m benchmarks.host --num_requests=100000

The parts: *schedule* who computes what; *cache* pages and prefixes; *build* the arrays of the step (numpy); *read* its
results; *text* from tokens; *hand over* to the streams of an event loop in another thread (processor time of both);
*other* is the engine's own. `decode`: every request draws a token in every step, each at another place of its pages.
`prompts`: each also ends after 32 tokens, and another comes in its place, with a prompt of 128. Launching a program,
sending it its arrays and waiting for it is not in here.

Then what waiting requests add to a step, a prefix's lookup, shedding, and the memory of a request. --num_requests
sends as many short requests through the engine and prints the resident memory meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import flags

from benchmarks import host_memory, machine
from benchmarks.host_engine import make_engine, prepare, time_parts
from dsjax.cache.hashes import UnitHashes
from dsjax.cache.manager import CacheManager
from dsjax.engine import Engine
from dsjax.request import Request, SamplingParams, TokenEvent
from servers import flags as server_flags
from servers.engine_thread import EngineThread
from servers.main import prepare_interpreter

PROGRAM = "benchmarks.host"
USAGE = f"python -m {PROGRAM} [--num_running=1,8,64,256] [--num_steps=200] [--num_requests=0] [--output=FILE]"
PARTS = ("schedule", "cache", "build", "read", "text", "other")
OUTPUT_LEN, INPUT_LEN = 32, 128  # of `prompts`
BLOCK = 20  # steps that are timed together: a median over single ones would leave out those that admit
DEVICE_S = 0.002  # the device's part of a step, in which a step's tokens are handed over
LONG = 32768  # tokens of the prompt that is looked up


def main(argv: Sequence[str] | None = None) -> int:
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_list("num_running", ["1", "8", "64", "256"], "running requests to measure at", flag_values=values)
    flags.DEFINE_integer("num_steps", 200, "timed steps of each", lower_bound=BLOCK, flag_values=values)
    flags.DEFINE_integer("num_waiting", 1000, "requests that wait, where some do", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("num_requests", 0, "short requests to watch the memory over", flag_values=values)
    flags.DEFINE_string("output", "", "append the results as lines of JSON to this file", flag_values=values)
    server_flags.parse(values, argv, USAGE)
    jax.config.update("jax_platforms", "cpu")  # where there are others, their start takes seconds
    rows: list[dict[str, Any]] = []
    print(header())
    for num_running in map(int, values.num_running):
        for scenario in ("decode", "prompts"):
            rows.append(measure_step(scenario, num_running, values.num_steps))
            print(line(rows[-1]), flush=True)
    print()
    for measured in (
        measure_waiting(values.num_waiting, values.num_steps),
        measure_lookup(),
        measure_shedding(values.num_waiting),
        host_memory.bytes_a_request(values.num_waiting),
    ):
        for name, value in measured.items():
            print(f"{name:<48}{value:>14,.1f}")
        rows.append(measured)
    if values.num_requests:
        print()
        rows += host_memory.watch(values.num_requests)
    if values.output:
        with open(values.output, "a", encoding="utf-8") as file:
            for row in (machine.describe(), *rows):
                file.write(json.dumps(row) + "\n")
    return 0


def header() -> str:
    columns = "".join(f"{name:>10}" for name in (*PARTS, "hand over", "sum", "untimed"))
    return f"microseconds a step\n{'':10}{'running':>8}{columns}"


def line(row: dict[str, Any]) -> str:
    """`sum` is of the parts; `untimed` is the same with no clock read inside a step, and so is the better figure."""
    columns = "".join(f"{row[f'{name}_us']:10.0f}" for name in (*PARTS, "hand_over", "sum", "step"))
    return f"{row['scenario']:10}{row['num_running']:8}{columns}"


# --- a step ------------------------------------------------------------------------------------------


def measure_step(scenario: str, num_running: int, num_steps: int) -> dict[str, Any]:
    """Microseconds a step: by part, in `sum`, and in `step_us` measured from outside, all with the hand-over."""
    untimed, _ = run_steps(scenario, num_running, num_steps)
    parts, events = run_steps(scenario, num_running, num_steps, by_part=True)
    hand_over = hand_over_us(events)
    found = {f"{name}_us": parts.get(name, 0.0) for name in PARTS} | {"hand_over_us": hand_over}
    total = {"sum_us": sum(found.values()), "step_us": untimed["step"] + hand_over}
    return {"scenario": scenario, "num_running": num_running, "num_steps": num_steps, **found, **total}


def run_steps(
    scenario: str, num_running: int, num_steps: int, by_part: bool = False
) -> tuple[dict[str, float], list[list[TokenEvent]]]:
    """Microseconds a step ("step", or by part), and if by part each step's events; else these go at once, as they do
    where streams take them: what is kept makes Python's collector a part of the figure."""
    engine = make_engine(max(num_running, 1))
    warm_up, unit = 2 * OUTPUT_LEN, engine.caches[0].spec.unit_tokens
    if scenario == "decode":
        for number in range(num_running):
            # Lengths differ, so that what is due once a page or unit is due of a few rows in every step.
            engine.add(request(number, INPUT_LEN + number % unit, num_steps + 4 * warm_up))
        refill = None
    else:
        for number in range(num_running):  # they end one after another, not all at once
            engine.add(request(number, INPUT_LEN, 1 + OUTPUT_LEN + number * OUTPUT_LEN // num_running))
        refill = Refill(engine, num_running)
    for _ in range(warm_up):
        step(engine, refill)
    events, times = [], []
    with time_parts(engine) if by_part else contextlib.nullcontext() as parts:
        for _ in range(num_steps // BLOCK):
            prepare(engine, BLOCK)
            begin = time.perf_counter()
            for _ in range(BLOCK):
                made = step(engine, refill)
                if by_part:
                    events.append(made)
            times.append((time.perf_counter() - begin) / BLOCK * 1e6)
    if parts is not None:
        return parts.us(len(events)), events
    return {"step": statistics.median(times)}, []


def step(engine: Engine, refill: Refill | None) -> list[TokenEvent]:
    events = engine.step()
    if refill is not None:
        refill(events)
    return events


class Refill:
    """Sends a request for each that ends."""

    def __init__(self, engine: Engine, first: int):
        self._engine, self._numbers = engine, itertools.count(first)

    def __call__(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finished:
                self._engine.add(request(next(self._numbers), INPUT_LEN, OUTPUT_LEN))


def request(number: int, input_len: int, output_len: int, **fields: Any) -> Request:
    """As a chat's, with a prompt that no other shares."""
    prompt = [number % 7919, number // 7919, *(7 + (number + i) % 4096 for i in range(input_len - 2))]
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=output_len, ignore_eos=True, seed=number)
    return Request(request_id=f"r{number}", prompt_token_ids=prompt, params=params, **fields)


# --- hand-over ---------------------------------------------------------------------------------------


class _Replay:
    """In place of an engine: gives out events that another one produced, a step at a time. What its steps themselves
    take, the wait for a device and making the events new as they come from an engine, is counted in `step_s`."""

    config = model_config = tokenizer = None
    max_model_len = LONG
    clock = staticmethod(time.monotonic)

    def __init__(self, steps: Sequence[list[TokenEvent]]):
        self.steps = deque(steps)
        self.go = False  # requests are still being added
        self.step_s = 0.0  # processor time

    def step(self) -> list[TokenEvent]:
        begin = time.thread_time()
        time.sleep(DEVICE_S)
        events = [dataclasses.replace(event) for event in self.steps.popleft()]
        self.step_s += time.thread_time() - begin
        return events

    def has_work(self) -> bool:
        return self.go and bool(self.steps)

    def wake_s(self) -> float | None:
        return None

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> bool:
        return True

    def warm_up(self, progress: bool = False) -> None: ...
    def watch(self, fail: Callable[[BaseException], None]) -> None: ...
    def close(self, error: BaseException | None = None) -> None: ...
    def prefetch(self, **hint: Any) -> bool:
        return False

    def first_token_s(self, num_prompt: int) -> float:
        return 0.0

    def stats(self) -> None: ...


def hand_over_us(steps: Sequence[list[TokenEvent]]) -> float:
    """Processor time a step, of the engine's thread and the event loop's, until each stream has its events."""
    return asyncio.run(_hand_over_us(steps))


async def _hand_over_us(steps: Sequence[list[TokenEvent]]) -> float:
    replay = _Replay(steps)
    thread = EngineThread(lambda: replay)
    thread.start()
    await thread.wait_ready()
    names = {event.request_id for events in steps for event in events}
    for number, name in enumerate(names):
        prompt = request(number, 2, 1).prompt_token_ids
        thread.submit(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams()))

    def begin(engine: _Replay) -> None:
        engine.go = True

    await thread.call(lambda engine: None)
    busy = time.process_time()
    await thread.call(begin)
    while replay.steps:
        await asyncio.sleep(0.1)
    await thread.call(lambda engine: None)  # behind the last step's events
    busy = time.process_time() - busy - replay.step_s
    await thread.stop(10.0)
    return busy / len(steps) * 1e6


# --- single figures ----------------------------------------------------------------------------------


def measure_waiting(num_waiting: int, num_steps: int, num_running: int = 64) -> dict[str, float]:
    """What waiting requests add to a step in which none of them can start: an engine with them and one without step by
    turns, for the machine's speed changes by more."""
    engines = [make_engine(num_running) for _ in range(2)]
    for engine, waiting in zip(engines, (0, num_waiting), strict=True):
        for number in range(num_running + waiting):
            engine.add(request(number, INPUT_LEN, num_steps + 100))
        for _ in range(40):
            engine.step()
    pairs = [tuple(map(_step_us, engines)) for _ in range(num_steps)]
    without, with_waiting = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "step_us_with_0_waiting": without,
        f"step_us_with_{num_waiting}_waiting": with_waiting,
        "waiting_adds_us_a_step": statistics.median(more - less for less, more in pairs),
    }


def _step_us(engine: Engine) -> float:
    prepare(engine, 1)
    return _us(engine.step)


def measure_lookup() -> dict[str, float]:
    """A prompt of LONG tokens: its hashes; then, of one that is cached as a whole, what the prefix index does."""
    engine = make_engine(1, max_model_len=LONG + 64)
    long = request(0, LONG, 1)
    engine.add(long)
    while engine.has_work():
        engine.step()
    cache: CacheManager = engine.caches[0]
    tokens, unit = [*long.prompt_token_ids, 1], cache.spec.unit_tokens
    hashing, known, both = [], [], []
    for _ in range(50):
        hashes = UnitHashes("", unit)
        hashing.append(_us(lambda hashes=hashes: hashes.extend(tokens, LONG // unit)))
        known.append(_us(lambda hashes=hashes: cache.match(tokens, "", hashes)))
        both.append(_us(lambda: cache.match(tokens, "", UnitHashes("", unit))))
    assert cache.match(tokens, "").num_tokens == LONG
    return {
        f"hash_{LONG}_tokens_us": statistics.median(hashing),
        f"lookup_{LONG}_tokens_us": statistics.median(known),
        f"hash_and_lookup_{LONG}_tokens_us": statistics.median(both),
    }


def measure_shedding(num_waiting: int) -> dict[str, float]:
    """An urgent request that may wait only so long comes, and all that wait but one have to go for it."""
    engine = make_engine(1, max_num_waiting=num_waiting, max_predicted_wait_s=15.0)
    for number in range(num_waiting):
        engine.add(request(number, INPUT_LEN, OUTPUT_LEN, priority=1))
    new = request(num_waiting, INPUT_LEN, OUTPUT_LEN, arrival_s=engine.clock())
    new.max_total_tokens = INPUT_LEN + OUTPUT_LEN
    engine.scheduler.describe(new)
    control = engine.control
    control.rate.step(10.0, new.expected_tokens)  # ten seconds each, so that no two may be before a new one
    begin = time.perf_counter()
    shed = control.admit(0.0, [new])
    seconds = time.perf_counter() - begin
    assert len(shed) == num_waiting - 1, len(shed)
    return {f"shed_{len(shed)}_requests_ms": seconds * 1e3}


def _us(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    prepare_interpreter()  # as a server does once it is warm
    sys.exit(main())
