"""The client of `benchmarks.streams_cost`: keeps many streams running, and asks for first tokens one by one.  [no jax]

Answers stay bytes until the end, so that the client costs little and holds nobody up; then each is checked.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from servers.proto.dsjax.v1 import inference_pb2 as pb

GENERATE = "/dsjax.v1.Inference/Generate"
PROMPT_LEN = 16
RAMP_S = 2.0  # over which streams begin
CONNECT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """`num_streams` at a time, of `output_len` tokens each; when one ends, another begins."""

    address: str
    vocab_size: int
    num_streams: int
    output_len: int
    stream_interval: int  # 0: what the server does by itself
    begin_s: float  # of what is counted, time.monotonic; then its end
    end_s: float


@dataclass
class _Answer:
    prompt: list[int]
    output_len: int
    messages: list[tuple[float, bytes]]  # when, what
    complete: bool = False


def request(ids: Sequence[int], max_tokens: int, interval: int = 0, request_id: str = "") -> bytes:
    params = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    message = pb.GenerateRequest(request_id=request_id, sampling_params=params, stream=True)
    message.token_ids.ids.extend(ids)
    if interval:
        message.stream_interval = interval
    return message.SerializeToString()


def random_prompt(vocab_size: int, rng: random.Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(PROMPT_LEN)]


def run(load: Load) -> dict[str, int]:
    """Until `load.end_s`. Returns how many "messages" and "tokens" came in time, "streams" that there were, and how
    many of them were "wrong". Raises AioRpcError if one ends with an error."""
    gc.disable()  # what is kept has no cycles
    try:
        answers = asyncio.run(_run(load))
    finally:
        gc.enable()
    counts = {"messages": 0, "tokens": 0, "streams": len(answers), "wrong": 0}
    for answer in answers:
        tokens: list[int] = []
        for time_s, data in answer.messages:
            new = [token for output in pb.GenerateResponse.FromString(data).outputs for token in output.token_ids]
            tokens += new
            if load.begin_s <= time_s < load.end_s:
                counts["messages"] += 1
                counts["tokens"] += len(new)
        length = answer.output_len if answer.complete else len(tokens)
        counts["wrong"] += tokens != [(answer.prompt[-1] + 1 + i) % load.vocab_size for i in range(length)]
    return counts


async def _run(load: Load) -> list[_Answer]:
    rng, answers = random.Random(0), []

    async def streams(open_call: Any, number: int) -> None:
        await asyncio.sleep(RAMP_S * number / load.num_streams)
        output_len = 1 + load.output_len * (number + 1) // load.num_streams  # so that later ones begin spread out
        while True:
            answer = _Answer(random_prompt(load.vocab_size, rng), output_len, [])
            answers.append(answer)
            async for data in open_call(request(answer.prompt, output_len, load.stream_interval)):
                answer.messages.append((time.monotonic(), data))
            answer.complete, output_len = True, load.output_len

    async with grpc.aio.insecure_channel(load.address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_S)
        open_call = channel.unary_stream(GENERATE)  # bytes in, bytes out
        tasks = [asyncio.ensure_future(streams(open_call, number)) for number in range(load.num_streams)]
        done, _ = await asyncio.wait(tasks, timeout=load.end_s - time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:  # only an error ends one
            task.result()
    return answers


def time_first_tokens(load: Load, prefix: str, output_len: int = 2) -> dict[str, float]:
    """{request id: when its first token came}, of requests one after the other from `load.begin_s` to `load.end_s`."""
    rng, times = random.Random(1), {}
    with grpc.insecure_channel(load.address) as channel:
        grpc.channel_ready_future(channel).result(CONNECT_S)
        open_call = channel.unary_stream(GENERATE)
        time.sleep(max(0.0, load.begin_s - time.monotonic()))
        while time.monotonic() < load.end_s:
            request_id = f"{prefix}{len(times)}"
            call = open_call(request(random_prompt(load.vocab_size, rng), output_len, 0, request_id))
            next(call)
            times[request_id] = time.monotonic()
            for _ in call:
                pass
            time.sleep(rng.uniform(0, 0.05))
    return times
