"""The GPU kernel of attention: equal to the jnp path in interpret mode, no races, what it moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from benchmarks.kernel_cost import kernels
from pallas_kernels import all_cases, gpu_attention
from pallas_kernels.blocks import Pages, QueryBlocks
from pallas_kernels.csa_attention import csa_attention
from pallas_kernels.entry_format import EntryFormat
from pallas_kernels.gpu_attention import softmax
from pallas_kernels.hca_attention import hca_attention
from pallas_kernels.online_softmax import Running
from pallas_kernels.pool import Pool, PoolShape
from pallas_kernels.swa_attention import reference, swa_attention
from pallas_kernels.target import CPU, Target

plgpu: Any = mosaic_gpu  # whose interpreter only JAX 0.12 has
GPU = Target("gpu", "sm_90a", interpret=True)
NEEDS_KERNELS = pytest.mark.skipif(not GPU.has_gpu_kernels, reason="GPU kernels need JAX 0.12")
WIDTH, ROPE, WINDOW, NUM_PAGES = 256, 64, 40, 20
EXACT = {"atol": 1e-5}  # float32 sums in another order
ROUNDED = {"atol": 2e-2}  # weights and keys in bfloat16; values are of order 1


class _World:
    """Rows with window pages in a ring and entry pages, in layer 1 of 2; the last is unused. What is unwritten is NaN.

    Row 0's window begins inside a page, wraps around the ring and ends inside a page; row 1 has one key and one query.
    """

    contexts = (150, 1)

    def __init__(
        self,
        heads: int,
        dtype: Any = jnp.float32,
        block: int = 1,
        ratio: int = 8,
        epp: tuple[int, int] = (64, 16),
        forms: tuple[str, str] = ("", ""),
    ):
        """`epp` and `forms` of the window's and the entries' pages, "" for `dtype`."""
        self.ratio = ratio
        self.rng = np.random.default_rng(3)
        self.dtype = dtype
        rows = len(self.contexts)
        self.length = [*(min(block, n) for n in self.contexts), 0]
        position = [*(n - have for n, have in zip(self.contexts, self.length, strict=False)), 0]
        self.blocks = QueryBlocks(jnp.array([*range(rows), 0]), jnp.array(position), jnp.array(self.length))
        self.q = jnp.asarray(self.rng.normal(size=(rows + 1, block, heads, WIDTH)), dtype)
        self.sink = jnp.asarray(self.rng.normal(size=heads), jnp.float32)
        self.window = self._pages(forms[0], epp[0], 2, lambda n: range(max(0, n - block - WINDOW + 1), n))
        self.entry = self._pages(forms[1], epp[1], -(-256 // (ratio * epp[1])), lambda n: range(n // ratio))
        self.chosen = jnp.asarray(self._chosen(block))

    def _chosen(self, block: int) -> np.ndarray:
        """Row 0 has 11 entries, or its first query the first 32 and others half of them, none the next 32; other rows
        have none."""
        entries = self.contexts[0] // self.ratio
        if block > 1:
            mask = np.zeros((len(self.length), block, self.entry.max_entries), bool)
            mask[0, :, :entries] = self.rng.random((block, entries)) < 0.5
            mask[0, 0, : min(32, entries)] = True
            mask[0, :, 32:64] = False
            return mask
        index = np.full((len(self.length), 20), self.entry.max_entries, np.int32)
        index[0, :11] = self.rng.permutation(entries)[:11]
        return index

    def _pages(self, form: str, epp: int, width: int, live) -> Pages:
        free = list(self.rng.permutation(NUM_PAGES))
        table = np.full((len(self.contexts), width), NUM_PAGES, np.int32)
        index = []
        for r, n in enumerate(self.contexts):
            pages: dict[int, int] = {}
            for i in live(n):
                if i // epp not in pages:
                    pages[i // epp] = table[r, i // epp % width] = free.pop()
                index.append((NUM_PAGES + pages[i // epp]) * epp + i % epp)
        shape = PoolShape(EntryFormat(form or jnp.dtype(self.dtype).name, WIDTH, ROPE), 2 * NUM_PAGES, epp)
        nan = {"uint8": 0x7F, "uint32": 0xFFFFFFFF}
        pool = jax.tree.map(lambda x: jnp.full(x.shape, nan.get(x.dtype.name, np.nan), x.dtype), shape.abstract(False))
        entries = jnp.asarray(self.rng.normal(size=(len(index), WIDTH)), self.dtype)
        return Pages(pool.write(jnp.array(index), entries), jnp.asarray(table), 1, NUM_PAGES)

    def run(self, kind: str, target: Target) -> np.ndarray:
        common = {"window": WINDOW, "scale": WIDTH**-0.5, "target": target}
        if kind == "swa":
            out = swa_attention(self.q, self.blocks, self.window, self.sink, **common)
        elif kind == "hca":
            out = hca_attention(self.q, self.blocks, self.window, self.entry, self.sink, ratio=self.ratio, **common)
        else:
            pages = (self.window, self.entry)
            out = csa_attention(self.q, self.blocks, *pages, self.chosen, self.sink, ratio=self.ratio, **common)
        return np.asarray(out)

    def check(self, kind: str, got: np.ndarray) -> None:
        """What the GPU kernel got is what the jnp path gets, and 0 for queries not in use: no key but the sink."""
        want = self.run(kind, CPU)
        assert np.isfinite(got).all()
        for r, length in enumerate(self.length):
            exact = self.dtype == jnp.float32
            np.testing.assert_allclose(got[r, :length], want[r, :length], **(EXACT if exact else ROUNDED))
            assert np.abs(got[r, length:]).max(initial=0) == 0


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("kind", "heads", "dtype"),
    [
        ("swa", 8, jnp.float32),
        ("hca", 8, jnp.float32),
        ("csa", 8, jnp.float32),
        ("hca", 64, jnp.float32),
        ("csa", 8, jnp.bfloat16),
    ],
)
def test_decode_equals_the_jnp_path(kind, heads, dtype):
    world = _World(heads, dtype)
    world.check(kind, world.run(kind, GPU))


@NEEDS_KERNELS
@pytest.mark.parametrize(("kind", "heads", "block", "ratio"), [("csa", 8, 2, 2), ("csa", 64, 2, 8), ("swa", 128, 2, 8)])
def test_prefill_equals_the_jnp_path(kind, heads, block, ratio):
    """A block of threads has several queries of eight heads, one of 64, or half of one of 128."""
    world = _World(heads, block=block, ratio=ratio)
    world.check(kind, world.run(kind, GPU))


@NEEDS_KERNELS
@pytest.mark.parametrize("epp", [(32, 8), (96, 32)])
def test_pages_smaller_and_larger_than_a_chunk(epp):
    world = _World(8, epp=epp)
    world.check("hca", world.run("hca", GPU))


@NEEDS_KERNELS
@pytest.mark.parametrize(
    ("kind", "block", "window", "entries"),
    [
        ("hca", 4, "int8", "fp8"),
        ("csa", 1, "fp8", "int8"),
    ],
)
def test_quantised_pages_equal_the_jnp_path(kind, block, window, entries):
    world = _World(8, block=block, forms=(window, entries))
    world.check(kind, world.run(kind, GPU))


@NEEDS_KERNELS
def test_more_heads_than_a_block_of_threads_has():
    world = _World(72)
    world.check("swa", world.run("swa", GPU))


@NEEDS_KERNELS
def test_a_part_of_the_softmax_is_what_the_jnp_path_has():
    world = _World(8)
    keys = [gpu_attention.window_keys(world.blocks, world.window, WINDOW, 1)]
    got = gpu_attention.attend(world.q, keys, world.sink, scale=0.1, target=GPU, partial=True)
    assert isinstance(got, Running)
    want = reference.attend_window(world.q, world.blocks, world.window, window=WINDOW, scale=0.1)
    np.testing.assert_allclose(got.maximum[:-1, 0], want.maximum[:-1], **EXACT)
    np.testing.assert_allclose(got.denominator[:-1, 0], want.denominator[:-1], **EXACT)
    np.testing.assert_allclose(got.total[:-1, 0], want.total[:-1], **EXACT)
    assert np.abs(got.total[-1]).max() == 0 and np.abs(got.denominator[-1]).max() == 0


def _detect_races():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


@NEEDS_KERNELS
@pytest.mark.parametrize(("kind", "block"), [("csa", 1), ("csa", 2)])
def test_no_races_between_two_warpgroups(kind, block):
    """Nor where codes and, at decode, gathered floats take turns in the same memory."""
    world = _World(32 // block, block=block, forms=("fp8", "fp8" if block > 1 else ""))
    with _detect_races():
        got = world.run(kind, GPU)
    world.check(kind, got)


@NEEDS_KERNELS
@pytest.mark.slow
def test_no_races_where_a_buffer_is_filled_again(monkeypatch):
    """150 keys are five chunks, one more than there are buffers."""
    monkeypatch.setitem(globals(), "WINDOW", 160)
    world = _World(32, epp=(96, 16))
    with _detect_races():
        got = world.run("swa", GPU)
    world.check("swa", got)


@NEEDS_KERNELS
def test_a_missing_barrier_is_found(monkeypatch):
    monkeypatch.setattr(softmax.Softmax, "meet", lambda self: None)
    try:
        with _detect_races(), pytest.raises(Exception, match="race"):
            _World(32).run("hca", GPU)
    finally:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        gpu_callbacks.reset_gpu_interpret_mode_state()


def test_the_path_is_chosen_from_shapes_and_target():
    def supports(target: Target, q_shape=(4, 1, 64, 512), dtype: Any = jnp.bfloat16, epp: int = 64) -> bool:
        pages = Pages(Pool.plain(jnp.zeros((2, epp, 512), dtype)), jnp.zeros((4, 1), jnp.int32), 0, 2)
        return gpu_attention.supports(jnp.zeros(q_shape, dtype), [pages], target)

    h100 = Target("gpu", "sm_90a")
    assert supports(h100) is h100.has_gpu_kernels is (jax.__version_info__ >= (0, 12))
    for heads in (8, 64, 128):
        assert supports(h100, q_shape=(4, 16, heads, 512)) is h100.has_gpu_kernels
    assert not supports(Target("gpu")) and not supports(CPU) and not supports(Target("tpu", "v6e"))
    assert not supports(h100, q_shape=(4, 16, 72, 512))
    assert not supports(h100, q_shape=(4, 1, 64, 576))
    assert not supports(h100, dtype=jnp.float32)
    assert not supports(h100, epp=4) and not supports(h100, epp=48)


def test_generations_by_compute_capability():
    def target(capability: str) -> Target:
        device: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)
        return Target.of(device)

    assert target("9.0") == Target("gpu", "sm_90a")
    assert target("10.0") == Target("gpu", "sm_100a")
    assert target("8.0") == Target("gpu") and not target("8.0").has_gpu_kernels


@NEEDS_KERNELS
def test_the_bytes_by_hand():
    def bytes_moved(name: str) -> int:
        case = next(case for case in all_cases.cases() if case.name == name)
        trace = jax.make_jaxpr(lambda arrays: case.call(Target("gpu", "sm_90a"), **arrays))
        return sum(kernel.bytes_moved for kernel in kernels(trace(case.inputs())))

    # 64 rows, 64 heads of 512: queries in bfloat16, results in float32; 128 keys of a window, on two pages
    q, out, key, window = 64 * 64 * 512 * 2, 64 * 64 * 512 * 4, 512 * 2, 128 * 512 * 2 + 2 * 4
    assert bytes_moved("swa_attention flash decode bfloat16") == q + out + 64 * window
    # and 32,768 / 128 entries on pages of 16; or 512 chosen ones
    assert bytes_moved("hca_attention flash decode bfloat16") == q + out + 64 * (window + 256 * key + 16 * 4)
    assert bytes_moved("csa_attention flash decode bfloat16") == q + out + 64 * (window + 512 * (key + 4))
    # in fp8 a byte a channel and 80 bytes of side words, of which a gathered entry's come by 128: 1.08 times the least
    fp8, window8 = 512 + 80, 128 * (512 + 80) + 2 * 4
    assert bytes_moved("hca_attention flash decode fp8") == q + out + 64 * (window8 + 256 * fp8 + 16 * 4)
    assert bytes_moved("csa_attention flash decode fp8") == q + out + 64 * (window8 + 512 * (fp8 + 48 + 4))
    # 192 blocks of 16 queries: 15 keys more; 32,768 / 4 entries on pages of 64, with a bit for each query
    q, out = (192 * 16 * x // 64 for x in (q, out))
    window, entries = 143 * key + 3 * 4, 8192 * key + 128 * 4 + 16 * 8192 // 8
    assert bytes_moved("csa_attention flash prefill bfloat16") == q + out + 192 * (window + entries)
