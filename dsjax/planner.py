"""What a model takes in memory and what a step costs, by arithmetic: bytes and floating-point operations.  [no jax]

All figures are of one device of the mesh. Formulas are those of the model's specification (spec): sizes of weights 1.2,
bytes of the cache 1.3, operations 1.4. Left out, because small beside them or never in the device's main memory where
kernels are fused: activations, residual streams and the rows of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsjax.cache.spec import CacheSpec, EntryKind
from dsjax.config import LayerKind, ModelConfig, ParallelConfig
from dsjax.errors import ConfigError
from dsjax.quant import FP4_BLOCK, FP8_BLOCK
from dsjax.runner.buckets import BLOCK_QUERIES, Bucket

Rows = Sequence[tuple[int, int]]  # (tokens computed before, new tokens) of each request in a step
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int32": 4}
# How a weight is spread: whole on each device; over the heads', the shard's or the experts' devices; read row by row.
WHOLE, HEADS, SHARD, EXPERT, EMBED = "whole", "heads", "shard", "expert", "embed"


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One array of the model, with the scales of a quantised one."""

    shape: tuple[int, ...]  # [..., in, out]
    form: str  # float32, bfloat16, int32, fp8 (128 x 128 float32 scales), fp4 (a scale byte for 32)
    split: str = WHOLE

    @property
    def num_params(self) -> int:
        return 0 if self.form == "int32" else math.prod(self.shape)  # a table of ids is no parameter

    @property
    def num_bytes(self) -> int:
        size = math.prod(self.shape)
        if self.form in _ITEM_BYTES:
            return size * _ITEM_BYTES[self.form]
        *stack, k, n = self.shape
        if self.form == "fp8":
            return size + 4 * math.prod(stack) * -(-k // FP8_BLOCK) * -(-n // FP8_BLOCK)
        return size // 2 + math.prod(stack) * -(-k // FP4_BLOCK) * n


def weights(model: ModelConfig, dtype: str = "bfloat16", *, stored: bool, with_mtp: bool = False) -> list[Weight]:
    """All arrays of a model: matrices in `dtype`, or with `stored` those that the checkpoint has quantised as there."""
    if not stored:
        model = model.widened()
    d, s = model.hidden_size, model.hc_mult
    out = [
        Weight(shape=(model.vocab_size, d), form=dtype, split=EMBED),
        Weight(shape=(d, model.vocab_size), form=dtype, split=SHARD),
        _vector(d),
        *_mixer(s, s * d),
    ]
    for layer, kind in enumerate(model.layer_kinds):
        out += _block(model, kind, layer < model.num_hash_layers, dtype)
    if with_mtp:
        projection = Weight(shape=(d, d), form=model.quant_method or dtype)
        out += [projection, projection, _vector(d), _vector(d), _vector(d), *_mixer(s, s * d)]
        out += _block(model, LayerKind.SLIDING, False, dtype)
    return out


def _vector(*shape: int, split: str = WHOLE) -> Weight:
    return Weight(shape=shape, form="float32", split=split)


def _mixer(outputs: int, inputs: int, scales: int = 1) -> list[Weight]:
    """Of hyper-connections: coefficients from all streams together."""
    return [_vector(outputs, inputs), _vector(outputs), _vector(scales)]


def _block(model: ModelConfig, kind: LayerKind, hashed: bool, dtype: str) -> Iterator[Weight]:
    """One layer."""
    d, n, h, s = model.hidden_size, model.num_attention_heads, model.head_dim, model.hc_mult
    q, groups, rank = model.q_lora_rank, model.o_groups, model.o_lora_rank
    e, f, stored = model.n_routed_experts, model.moe_intermediate_size, model.quant_method or dtype
    for shape, split in (
        ((d, q), WHOLE),
        ((q, n * h), HEADS),
        ((d, h), WHOLE),
        ((groups, n * h // groups, rank), HEADS),
        ((groups * rank, d), HEADS),
        ((d, 2 * f * model.n_shared_experts), SHARD),
        ((f * model.n_shared_experts, d), SHARD),
    ):
        yield Weight(shape=shape, form=stored, split=split)
    yield from (_vector(n, split=HEADS), _vector(q), _vector(h), _vector(d), _vector(d))
    for _ in range(2):
        yield from _mixer((2 + s) * s, s * d, scales=3)
    expert = model.expert_format or dtype
    yield Weight(shape=(e, d, 2 * f), form=expert, split=EXPERT)
    yield Weight(shape=(e, f, d), form=expert, split=EXPERT)
    yield _vector(d, e)
    yield Weight(shape=(model.vocab_size, model.num_experts_per_tok), form="int32") if hashed else _vector(e)
    if kind is LayerKind.HCA:
        yield from _compressor(d, h, h, model.hca_ratio, dtype)
    if kind is LayerKind.CSA:
        heads, width = model.index_n_heads, model.index_head_dim
        yield from _compressor(d, 2 * h, h, model.csa_ratio, dtype)
        yield from _compressor(d, 2 * width, width, model.csa_ratio, dtype)
        yield Weight(shape=(q, heads * width), form=stored, split=SHARD)
        yield Weight(shape=(d, heads), form=dtype)


def _compressor(hidden: int, channels: int, width: int, ratio: int, dtype: str) -> list[Weight]:
    projection = Weight(shape=(hidden, channels), form=dtype)
    return [projection, projection, _vector(ratio, channels), _vector(width)]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of one step on the device that has most to do."""

    weight_bytes: float  # read
    cache_read_bytes: float
    cache_write_bytes: float
    matmul_flops: float  # with weights
    attention_flops: float  # with cache entries, indexer included

    @property
    def bytes_moved(self) -> float:
        return self.weight_bytes + self.cache_read_bytes + self.cache_write_bytes

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


def num_distinct(num_experts: int, num_per_token: int, num_tokens: float) -> float:
    """Experts that `num_tokens` tokens touch, expected where each draws its own evenly: E (1 - (1 - k / E)^T)."""
    return num_experts * (1.0 - (1.0 - num_per_token / num_experts) ** num_tokens)


class Planner:
    """The memory and the steps of one model on one mesh (without pipeline stages), with the cache of `spec`."""

    def __init__(
        self,
        model: ModelConfig,
        spec: CacheSpec,
        *,
        dtype: str = "bfloat16",
        stored: bool = True,
        with_mtp: bool = False,
        parallel: ParallelConfig | None = None,
    ):
        parallel = parallel or ParallelConfig()
        if parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not planned: only 1 is, use more "
                "data or tensor parallel devices"
            )
        self.model, self.spec, self.parallel = model, spec, parallel
        shard, kv = parallel.tensor_parallel_size, parallel.kv_parallel
        even = model.num_attention_heads % shard == 0 and model.o_groups % shard == 0
        self._over_experts = parallel.num_devices if parallel.expert_parallel else shard
        parts = {WHOLE: 1, HEADS: shard if even else shard // kv, SHARD: shard, EMBED: shard}
        parts[EXPERT] = self._over_experts
        self.weight_bytes = 0  # of all weights
        self._dense_bytes, self._dense_params = 0.0, 0.0  # that every step reads, and every token is multiplied with
        for weight in weights(model, dtype, stored=stored, with_mtp=with_mtp):
            self.weight_bytes += weight.num_bytes // parts[weight.split]
        expert_bytes = expert_params = 0
        for weight in weights(model, dtype, stored=stored):
            if weight.split == EXPERT:
                expert_bytes += weight.num_bytes // model.n_routed_experts
                expert_params += weight.num_params // model.n_routed_experts
            elif weight.split != EMBED and weight.form != "int32":
                self._dense_bytes += weight.num_bytes / parts[weight.split]
                self._dense_params += weight.num_params / parts[weight.split]
        self._head_params = model.hidden_size * model.vocab_size / shard
        self._dense_params -= self._head_params
        # One expert of every layer, as far as one device has it where experts are cut and not dealt out.
        self._expert_bytes, self._expert_params = expert_bytes, expert_params
        self._entry_bytes = {kind: k.page_bytes / k.entries_per_page for kind, k in spec.kinds.items()}
        self._attention = 4.0 * model.num_attention_heads * model.head_dim / shard  # of a query with an entry
        self._scores = 2.0 * model.index_n_heads * model.index_head_dim / kv

    @property
    def cache_bytes(self) -> int:
        """Of pages and STATE."""
        return self.spec.num_bytes()

    def check_fits(self, memory_bytes: int, reserve_bytes: int = 0) -> None:
        """Raises ConfigError if weights, cache and `reserve_bytes` for temporaries are more than a device has."""
        total = self.weight_bytes + self.cache_bytes + reserve_bytes
        if total > memory_bytes:
            left = memory_bytes - self.weight_bytes - reserve_bytes
            advice = f"set cache_memory_bytes to at most {left}" if left > 0 else "raise tensor_parallel_size"
            raise ConfigError(
                f"weights take {self.weight_bytes} bytes of a device and the cache {self.cache_bytes}, with "
                f"{reserve_bytes} in reserve more than its {memory_bytes}: {advice}"
            )

    def step(self, shards: Sequence[Rows], bucket: Bucket | None = None) -> StepCost:
        """The cost of a step with the rows of each data shard; matmuls are those of the bucket it is padded to."""
        num_tokens = [sum(num_new for _, num_new in rows) for rows in shards]
        most = max(num_tokens)
        padded, num_rows = (bucket.num_tokens, bucket.num_rows) if bucket else (most, max(map(len, shards)))
        # Dealt out over the mesh, experts have the tokens of all shards; else a shard's, each device a slice of all.
        routed = sum(num_tokens) if self.parallel.expert_parallel else most
        model, over = self.model, self._over_experts
        distinct = num_distinct(model.n_routed_experts, model.num_experts_per_tok, routed)
        parts = [self._attend(rows) for rows in shards if rows]
        read, written, flops = (max(values) for values in zip(*parts, strict=True))
        return StepCost(
            weight_bytes=self._dense_bytes + distinct * self._expert_bytes / over,
            cache_read_bytes=read,
            cache_write_bytes=written,
            matmul_flops=2.0 * self._dense_params * padded
            + 2.0 * self._head_params * num_rows
            + 2.0 * model.num_experts_per_tok * routed * self._expert_params / over,
            attention_flops=flops,
        )

    def _attend(self, rows: Rows) -> tuple[float, float, float]:
        """Bytes read, bytes written and operations of one shard's rows with the cache.

        A row's queries share a read of its entries in blocks of BLOCK_QUERIES. A block reads the windows of all its
        queries; every index key and every HCA entry that the last of them sees; and of CSA entries at most index_topk
        a query, and none twice.
        """
        model, size, kinds = self.model, self._entry_bytes, self.spec.kinds
        starts, num_new = np.asarray(rows, np.int64).reshape(-1, 2).T
        ends = starts + num_new
        block_ends, queries = _blocks(starts, num_new)
        window = model.sliding_window
        num_layers = kinds[EntryKind.WINDOW].num_layers
        read = size[EntryKind.WINDOW] * np.minimum(block_ends, window - 1 + queries).sum()
        written = size[EntryKind.WINDOW] * num_new.sum()
        flops = num_layers * self._attention * _seen(starts, ends, 1, window)
        if EntryKind.CSA in kinds:
            ratio, top, layers = model.csa_ratio, model.index_topk, kinds[EntryKind.CSA].num_layers
            visible = block_ends // ratio
            read += size[EntryKind.INDEX_KEY] * visible.sum()
            read += size[EntryKind.CSA] * np.minimum(visible, top * queries).sum()
            both = size[EntryKind.CSA] + size[EntryKind.INDEX_KEY]
            written += both * (ends // ratio - starts // ratio).sum()
            flops += layers * self._attention * _seen(starts, ends, ratio, top)
            flops += layers * self._scores * _seen(starts, ends, ratio)
        if EntryKind.HCA in kinds:
            ratio, layers = model.hca_ratio, kinds[EntryKind.HCA].num_layers
            read += size[EntryKind.HCA] * (block_ends // ratio).sum()
            written += size[EntryKind.HCA] * (ends // ratio - starts // ratio).sum()
            flops += layers * self._attention * _seen(starts, ends, ratio)
        state = 4 * self.spec.state_values * len(starts)
        return float(read + state), float(written + state), float(flops)


def _blocks(starts: np.ndarray, num_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position after the last query, number of queries) of every block of all rows."""
    one = num_new == 1
    ends, counts = [starts[one] + 1], [num_new[one]]
    for start, num in zip(starts[~one].tolist(), num_new[~one].tolist(), strict=True):
        firsts = np.arange(0, num, BLOCK_QUERIES)
        count = np.minimum(num - firsts, BLOCK_QUERIES)
        ends.append(start + firsts + count)
        counts.append(count)
    return np.concatenate(ends), np.concatenate(counts)


def _seen(starts: np.ndarray, ends: np.ndarray, ratio: int, most: int | None = None) -> int:
    """Entries, summed over the queries start .. end - 1 of all rows: query p sees (p + 1) // ratio, at most `most`."""
    return int((_seen_below(ends, ratio, most) - _seen_below(starts, ratio, most)).sum())


def _seen_below(n: np.ndarray, ratio: int, most: int | None) -> np.ndarray:
    """The sum of min(q // ratio, most) for q = 1 .. n."""
    if most is None:
        whole, rest = n // ratio, n % ratio
        return ratio * (whole * (whole - 1) // 2) + whole * (rest + 1)
    limit = most * ratio - 1  # up to there none sees `most`
    return _seen_below(np.minimum(n, limit), ratio, None) + np.maximum(n - limit, 0) * most
