"""Page ids of one pool: free ones and the reference counts of the others.  [no jax]

A reference is a request's or the prefix cache's. A page that only the prefix cache holds is *cached*: evicting what
holds it makes it free, so `num_free + num_cached` pages can always be had.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class PagePool:
    """Pages 0..num_pages-1. A freed page goes to the end of the queue, so an id is reused as late as possible."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._num_refs = [0] * num_pages  # all references
        self._num_cache_refs = [0] * num_pages  # those of the prefix cache
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Pages that some request holds."""
        return self.num_pages - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """Pages to be had once the prefix cache gives up all it can."""
        return len(self._free) + self._num_cached

    def allocate(self, num: int) -> list[int]:
        """Takes `num` free pages with one request reference each; ValueError (and nothing taken) if there are fewer."""
        if num > len(self._free):
            raise ValueError(f"{num} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.popleft() for _ in range(num)]
        for page in pages:
            self._num_refs[page] = 1
        return pages

    def retain(self, page: int, *, cache: bool = False) -> None:
        """Adds a reference (the prefix cache's if `cache`) to a page that has one; ValueError for a free page."""
        refs = self._num_refs[page]
        if not refs:
            raise ValueError(f"page {page} is free and cannot be retained")
        self._num_refs[page] = refs + 1
        if cache:
            self._num_cache_refs[page] += 1
        elif refs == self._num_cache_refs[page]:
            self._num_cached -= 1

    def release(self, page: int, *, cache: bool = False) -> None:
        """Drops a reference of that holder; the last one frees the page. ValueError if the holder has none."""
        refs, cache_refs = self._num_refs[page], self._num_cache_refs[page]
        if not (cache_refs if cache else refs - cache_refs):
            raise ValueError(
                f"page {page} has no reference of {'the prefix cache' if cache else 'a request'} to release"
            )
        self._num_refs[page] = refs - 1
        if cache:
            self._num_cache_refs[page] = cache_refs - 1
        elif refs - 1 == cache_refs > 0:
            self._num_cached += 1
        if refs == 1:
            self._num_cached -= cache
            self._free.append(page)

    def num_cache_refs(self, page: int) -> int:
        """References of the prefix cache to a page that nothing else holds; 0 if something does."""
        return self._num_cache_refs[page] if self._num_refs[page] == self._num_cache_refs[page] else 0

    def check(self, request_holds: Iterable[int], cache_holds: Iterable[int]) -> None:
        """AssertionError unless the references are exactly these (a page once for each) and all else is free once."""
        by_request, by_cache = Counter(request_holds), Counter(cache_holds)
        free = Counter(self._free)
        assert all(count == 1 for count in free.values()), f"pages twice in the free queue: {free}"
        for page in range(self.num_pages):
            expected = by_request[page] + by_cache[page], by_cache[page], not by_request[page] and not by_cache[page]
            actual = self._num_refs[page], self._num_cache_refs[page], page in free
            assert actual == expected, f"page {page}: (refs, cache refs, free) is {actual}, holders say {expected}"
        assert self._num_cached == sum(self.num_cache_refs(page) > 0 for page in range(self.num_pages))
        assert self.num_free + self.num_cached + self.num_used == self.num_pages
