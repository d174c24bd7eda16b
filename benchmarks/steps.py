"""Steps made by hand, for benchmarks of the runner alone."""

from __future__ import annotations

import numpy as np

from dsjax.cache.manager import CacheManager
from dsjax.request import Request, SamplingParams
from dsjax.scheduler.plan import RowPlan


def make_row(cache: CacheManager, number: int, start: int, num_new: int, vocab_size: int) -> RowPlan:
    """Request `number` with pages for all of its tokens, of which `start` count as computed and `num_new` come next.

    Tokens are random; what the pages hold is whatever is in them. Raises AssertionError if the cache is too small.
    """
    tokens = np.random.default_rng(number).integers(3, vocab_size, size=start + num_new).tolist()
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        params=SamplingParams(temperature=0, max_tokens=8),
        token_ids=list(tokens),
    )
    chunk = cache.spec.max_chunk_tokens
    if cache.admit(request.request_id, request.token_ids, "", False, chunk) is None:
        raise AssertionError("the cache was sized for these requests")
    for end in (*range(chunk, start, chunk), *([start] if start else []), start + num_new):
        if not cache.extend(request.request_id, end):
            raise AssertionError("the cache was sized for these requests")
        cache.computed(request.request_id, request.token_ids, min(end, start))
    return RowPlan(
        request=request,
        cache=cache.request(request.request_id),
        start=start,
        num_new=num_new,
        samples=True,
        first_of_stay=False,
    )
