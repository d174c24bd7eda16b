"""Which arrays the cache consists of and how many pages each pool has.  [no jax]

A pool of pages is shared by all layers of a kind: page `i` of layer `l` is row `l * num_pages + i` of the kind's
arrays, whose pages are as `pallas_kernels.entry_format` has them. INDEX_KEY entries live and die with the CSA entries
of the same tokens, so they have a pool of their own but use CSA's page ids.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dsjax.config import CacheConfig, LayerKind, ModelConfig, SchedulerConfig
from dsjax.errors import ConfigError
from pallas_kernels.entry_format import EntryFormat


class EntryKind(enum.StrEnum):
    """What an entry of the cache is."""

    WINDOW = "window"  # the raw latent of a token; only the last `sliding_window` matter
    CSA = "csa"  # a compressed latent
    INDEX_KEY = "index_key"  # the indexer's key of a CSA entry
    HCA = "hca"  # a heavily compressed latent
    STATE = "state"  # partly filled compression windows; one slot a request or snapshot, not paged


POOL_KINDS = (EntryKind.WINDOW, EntryKind.CSA, EntryKind.HCA)  # the kinds with page tables of their own


@dataclass(frozen=True)
class Copy:
    """Page (all layers; CSA's also in the INDEX_KEY array) or, for STATE, slot `src` to `dst`."""

    kind: EntryKind
    src: int
    dst: int


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """One kind of paged entry."""

    kind: EntryKind
    num_layers: int
    format: EntryFormat
    ratio: int  # tokens an entry
    entries_per_page: int
    num_pages: int  # of each layer
    table_width: int  # page-table columns of a request
    window: int | None = None  # WINDOW alone: the sliding window in tokens, the token itself included
    num_parts: int = 1  # devices that each hold a part of every page's entries
    tiled: bool = False

    @property
    def local_entries(self) -> int:
        """Entries of a page on each device."""
        return self.entries_per_page // self.num_parts

    @property
    def gathered(self) -> bool:
        """Whether it is read entry by entry."""
        return self.kind is EntryKind.CSA

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers, on each device."""
        shapes = self.format.page_shapes(self.local_entries, self.tiled, self.gathered)
        return self.num_layers * sum(math.prod(shape) * _ITEM_BYTES[dtype] for shape, dtype in shapes)

    def first_seen(self, num_tokens: int) -> int:
        """The first WINDOW page of which the next token after so many sees a row."""
        return max(0, num_tokens - (self.window or 0) + 1) // self.entries_per_page

    def num_entries(self, num_tokens: int) -> int:
        """Entries that the first `num_tokens` tokens complete."""
        return num_tokens // self.ratio

    def num_table_pages(self, num_tokens: int) -> int:
        """Pages that hold the entries of the first `num_tokens` tokens (of a kind without a window)."""
        return -(-(num_tokens // self.ratio) // self.entries_per_page)


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The whole cache of one model. `kinds` holds only kinds that some layer has."""

    kinds: dict[EntryKind, KindSpec]
    unit_tokens: int  # tokens a hash of the prefix cache covers
    snapshot_interval_tokens: int  # a multiple of unit_tokens
    num_slots: int  # row slots: running requests
    num_snapshots: int  # 0 is no prefix cache
    max_request_tokens: int  # the longest request the pools can hold, at most max_model_len
    max_chunk_tokens: int  # the most tokens of one request that a step may add
    state_values: int  # float32 values of one STATE slot, all layers

    @cached_property
    def pool_kinds(self) -> tuple[EntryKind, ...]:
        return tuple(kind for kind in POOL_KINDS if kind in self.kinds)

    @cached_property
    def compressed_kinds(self) -> tuple[EntryKind, ...]:
        return tuple(kind for kind in self.pool_kinds if self.kinds[kind].window is None)

    @property
    def num_state_slots(self) -> int:
        """Row slots, then snapshot slots."""
        return self.num_slots + self.num_snapshots

    def num_bytes(self) -> int:
        """Bytes of all arrays, pages and STATE, on each device of a data shard."""
        pages = sum(kind.num_pages * kind.page_bytes for kind in self.kinds.values())
        return pages + self.num_state_slots * self.state_values * 4

    def bytes_per_token(self) -> float:
        """Bytes that a token more adds to a long request's full pages, on each device."""
        kinds = [kind for kind in self.kinds.values() if kind.window is None]
        return sum(kind.page_bytes / (kind.entries_per_page * kind.ratio) for kind in kinds)

    def record_bytes(self, num_tokens: int) -> int:
        """Bytes of what is needed to go on at a position: pages and a STATE slot, on each device."""
        num_pages = {kind: spec.num_table_pages(num_tokens) for kind, spec in self.kinds.items()}
        window = self.kinds[EntryKind.WINDOW]
        rows = min(num_tokens, (window.window or 1) - 1)
        num_pages[EntryKind.WINDOW] = _span_pages(rows, window.entries_per_page) if rows else 0
        return sum(num * self.kinds[kind].page_bytes for kind, num in num_pages.items()) + self.state_values * 4

    def num_requests(self, num_tokens: int) -> tuple[int, EntryKind]:
        """How many requests of so many tokens fit at once, whatever they share, and the kind of which there are too few
        pages for more."""
        fits = {}
        for kind in (self.kinds[kind] for kind in self.pool_kinds):
            entries, num_pages = kind.entries_per_page, kind.num_pages
            if kind.window is None:
                one = kind.num_table_pages(num_tokens)
            else:  # as in `can_hold`
                one = min(_span_pages(kind.window, entries) + 1, -(-num_tokens // entries))
                num_pages = max(one, num_pages - -(-self.max_chunk_tokens // entries))
            if one:
                fits[kind.kind] = num_pages // one
        least = min(fits, key=lambda kind: fits[kind])
        return fits[least], least

    def describe(self, max_model_len: int) -> str:
        """How many requests fit at once, in words."""
        parts = []
        for num_tokens, words in ((max_model_len, "max_model_len="), (max_model_len // 8, "")):
            num, kind = self.num_requests(num_tokens)
            bound = f"max_num_seqs={self.num_slots}" if num >= self.num_slots else f"{kind.value} pages"
            parts.append(f"{min(num, self.num_slots)} of {words}{num_tokens} tokens ({bound})")
        counts = ", ".join(f"{self.kinds[kind].num_pages} {kind.value}" for kind in self.pool_kinds)
        return f"requests that fit at once: {' or '.join(parts)}; pages: {counts}"

    def can_hold(self, totals: Sequence[int]) -> bool:
        """Whether requests of so many tokens each fit all at once, whatever they share."""
        for kind in self.kinds.values():
            entries = kind.entries_per_page
            if kind.window is None:
                needed = sum(kind.num_table_pages(total) for total in totals)
            else:  # chunks of all together are one step's budget; each window also begins and ends inside a page
                windows = sum(min(_span_pages(kind.window, entries) + 1, -(-total // entries)) for total in totals)
                needed = windows + -(-min(self.max_chunk_tokens, sum(totals)) // entries)
            if needed > kind.num_pages:
                return False
        return True

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int,
        dtype: str = "float32",
        num_mtp_layers: int = 0,
        num_parts: int = 1,
        tiled: bool = False,
        as_bits: bool = False,
    ) -> CacheSpec:
        """Sizes the pools of one data shard. `dtype` is the activations', which formats left to `auto` have.
        `num_mtp_layers` MTP blocks have window rows of their own, after the layers'. Each of `num_parts` devices holds
        that part of every page's entries, `block_size` of them. Pages are `tiled` where a TPU's kernels read them, and
        bfloat16 is kept `as_bits` on a CPU, see `entry_format`.

        Without `num_gpu_blocks_override`: for `max_num_seqs` requests of `max_model_len` and `num_snapshots` snapshots,
        shrunk to `cache_memory_bytes`. Raises ConfigError when not even one request of some length fits, or a format
        cannot hold the model's entries.
        """
        block, window = cache.block_size * num_parts, model.sliding_window
        num_snapshots = cache.num_snapshots if cache.enable_prefix_caching else 0
        csa, hca = model.layer_kinds.count(LayerKind.CSA), model.layer_kinds.count(LayerKind.HCA)
        state_values = csa * 6 * (model.head_dim + model.index_head_dim) + hca * 3 * model.head_dim
        state_bytes = (scheduler.max_num_seqs + num_snapshots) * state_values * 4
        kinds = _layouts(model, cache, dtype, num_mtp_layers, num_parts, tiled, as_bits)
        pooled = {kind: layout for kind, layout in kinds.items() if kind is not EntryKind.INDEX_KEY}
        page_bytes = {kind: layout.page_bytes for kind, layout in pooled.items()}
        if EntryKind.CSA in kinds:  # a page has both
            page_bytes[EntryKind.CSA] += kinds[EntryKind.INDEX_KEY].page_bytes
        if cache.num_gpu_blocks_override:
            pages = _override_pages(cache, block, window, max_model_len, pooled)
        else:
            pages = _default_pages(scheduler, num_snapshots, window, max_model_len, pooled)
            chunk_pages = _span_pages(window - 1 + scheduler.max_num_batched_tokens, block)
            pages = _fit(pages, page_bytes, cache, scheduler, state_bytes, min(chunk_pages, -(-max_model_len // block)))
        if EntryKind.CSA in kinds:
            pages[EntryKind.INDEX_KEY] = pages[EntryKind.CSA]

        max_tokens, max_chunk = max_model_len, scheduler.max_num_batched_tokens
        for kind, layout in kinds.items():
            entries = layout.entries_per_page
            if kind is EntryKind.WINDOW:
                # A chunk and the window before it, wherever they begin in a page, and a page to spare: no two live
                # pages fall on one column of the ring.
                width = -(-(window - 1 + scheduler.max_num_batched_tokens) // entries) + 2
                width = min(width, -(-max_model_len // entries))
                if pages[kind] * entries < max_model_len:
                    max_chunk = min(max_chunk, (pages[kind] - 1) * entries - window + 2)
            else:
                width = -(-max_model_len // (layout.ratio * entries))
                max_tokens = min(max_tokens, pages[kind] * entries * layout.ratio + layout.ratio - 1)
            kinds[kind] = dataclasses.replace(layout, num_pages=pages[kind], table_width=width)
        unit = cache.prefix_unit_tokens
        return cls(
            kinds=kinds,
            unit_tokens=unit,
            snapshot_interval_tokens=-(-cache.snapshot_interval_tokens // unit) * unit,
            num_slots=scheduler.max_num_seqs,
            num_snapshots=num_snapshots,
            max_request_tokens=max_tokens,
            max_chunk_tokens=max_chunk,
            state_values=state_values,
        )


def _span_pages(num_rows: int, entries_per_page: int) -> int:
    """The most pages that `num_rows` >= 1 consecutive rows can touch."""
    return -(-(num_rows - 1) // entries_per_page) + 1


_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1, "uint16": 2, "uint32": 4}
_Layouts = dict[EntryKind, KindSpec]


def _layouts(
    model: ModelConfig,
    cache: CacheConfig,
    dtype: str,
    num_mtp_layers: int,
    num_parts: int,
    tiled: bool,
    as_bits: bool,
) -> _Layouts:
    """The kinds that some layer has, each with one page still."""
    csa, hca = model.layer_kinds.count(LayerKind.CSA), model.layer_kinds.count(LayerKind.HCA)
    block = cache.block_size
    found: _Layouts = {}

    def add(kind: EntryKind, layers: int, ratio: int, entries: int, window: int | None = None) -> None:
        if layers:
            form = _format(kind, model, cache, dtype, as_bits)
            found[kind] = KindSpec(
                kind=kind,
                num_layers=layers,
                format=form,
                ratio=ratio,
                entries_per_page=entries * num_parts,
                num_pages=1,
                table_width=1,
                window=window,
                num_parts=num_parts,
                tiled=tiled and form.can_tile(),
            )

    add(EntryKind.WINDOW, model.num_hidden_layers + num_mtp_layers, 1, block, model.sliding_window)
    add(EntryKind.CSA, csa, model.csa_ratio, block)
    add(EntryKind.INDEX_KEY, csa, model.csa_ratio, block)
    add(EntryKind.HCA, hca, model.hca_ratio, max(1, block // 4))
    return found


def _format(kind: EntryKind, model: ModelConfig, cache: CacheConfig, dtype: str, as_bits: bool) -> EntryFormat:
    name = cache.entry_format(kind.value, dtype)
    as_bits = as_bits and name == "bfloat16"
    try:
        if kind is EntryKind.INDEX_KEY:
            return EntryFormat(name, model.index_head_dim, as_bits=as_bits)
        return EntryFormat(name, model.head_dim, model.qk_rope_head_dim, as_bits)
    except ValueError as error:
        raise ConfigError(
            f"kv_cache_dtype={cache.kv_cache_dtype!r} does not fit this model's {kind.value} entries: {error}"
        ) from error


def _override_pages(
    cache: CacheConfig, block: int, window: int, max_model_len: int, layouts: _Layouts
) -> dict[EntryKind, int]:
    num_blocks = cache.num_gpu_blocks_override
    least = min(_span_pages(window, block), -(-max_model_len // block))
    if num_blocks < least:
        raise ConfigError(
            f"num_gpu_blocks_override={num_blocks} must be at least {least}: one request needs the pages of "
            f"sliding_window={window} tokens at {block} entries a page"
        )
    num_tokens = num_blocks * block
    return {
        kind: num_blocks if kind is EntryKind.WINDOW else max(1, -(-(num_tokens // ratio) // entries))
        for kind, (ratio, entries) in _places(layouts).items()
    }


def _places(layouts: _Layouts) -> dict[EntryKind, tuple[int, int]]:
    """Tokens an entry and entries a page."""
    return {kind: (layout.ratio, layout.entries_per_page) for kind, layout in layouts.items()}


def _default_pages(
    scheduler: SchedulerConfig, num_snapshots: int, window: int, max_model_len: int, layouts: _Layouts
) -> dict[EntryKind, int]:
    num_seqs = scheduler.max_num_seqs
    pages = {}
    for kind, (ratio, entries) in _places(layouts).items():
        if kind is EntryKind.WINDOW:
            # Chunks of all requests together are one step's budget; each also begins and ends inside a page.
            one = min(_span_pages(window, entries) + 1, -(-max_model_len // entries))
            pages[kind] = num_seqs * one + -(-scheduler.max_num_batched_tokens // entries)
            pages[kind] += num_snapshots * _span_pages(max(1, window - 1), entries)
        else:
            pages[kind] = num_seqs * max(1, -(-(max_model_len // ratio) // entries))
    return pages


def _fit(
    pages: dict[EntryKind, int],
    page_bytes: dict[EntryKind, int],
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    state_bytes: int,
    least_window_pages: int,
) -> dict[EntryKind, int]:
    """Shrinks `pages` until pages and STATE take at most `cache_memory_bytes`.

    Compressed pages shrink in proportion. Short requests need as many window pages as long ones, so of these there are
    all, unless they would take more than half of the memory, or than their share.
    """
    budget = cache.cache_memory_bytes - state_bytes
    window_bytes = pages[EntryKind.WINDOW] * page_bytes[EntryKind.WINDOW]
    rest = sum(pages[kind] * page_bytes[kind] for kind in pages) - window_bytes
    if window_bytes + rest <= budget:
        return pages
    share = budget * max(window_bytes, (window_bytes + rest) // 2) // (window_bytes + rest)
    window_pages = min(pages[EntryKind.WINDOW], max(least_window_pages, share // page_bytes[EntryKind.WINDOW]))
    left = budget - window_pages * page_bytes[EntryKind.WINDOW]
    fitted = {kind: num * max(0, left) // rest for kind, num in pages.items() if kind is not EntryKind.WINDOW}
    if left < 0 or 0 in fitted.values():
        least = window_pages * page_bytes[EntryKind.WINDOW] + state_bytes
        raise ConfigError(
            f"cache_memory_bytes={cache.cache_memory_bytes} is too small: STATE and the window pages of one chunk take "
            f"{least} bytes and each compressed kind needs a page; raise it, or lower max_num_seqs="
            f"{scheduler.max_num_seqs}, num_snapshots={cache.num_snapshots} or max_num_batched_tokens="
            f"{scheduler.max_num_batched_tokens}"
        )
    return {EntryKind.WINDOW: window_pages, **fitted}
