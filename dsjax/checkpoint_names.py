"""Which checkpoint tensors make which parameter: names, shapes and layouts of DeepSeek-V4.  [no jax]

A parameter of the model is one array, kernels as [in, out]. Checkpoints store matrices as [out, in], one tensor per
expert and projection (released names) or fused experts (transformers' names). A `Param` seen with its last two axes
swapped back (`transposed`) is filled piece by piece: `Source.index` says which piece a tensor is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dsjax import quant
from dsjax.config import LayerKind, ModelConfig
from dsjax.errors import ConfigError


class SourceKind(Enum):
    """What a checkpoint tensor may be stored as."""

    F32 = "F32"  # kept in float32 by every writer
    FLOAT = "FLOAT"  # unquantised, any float
    LINEAR = "LINEAR"  # any float, or FP8
    EXPERT = "EXPERT"  # any float, FP8, or packed FP4
    IDS = "IDS"  # integers
    CODES = "CODES"  # FP8 or packed FP4, taken as it is
    SCALE = "SCALE"  # the scale of the weight that `Source.name` names


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint: `name` and unpacked `shape` there; `index` is its place in the `Param`."""

    name: str
    shape: tuple[int, ...]
    kind: SourceKind
    index: tuple[Any, ...] = (...,)


@dataclass(frozen=True)
class Param:
    """One array of the model: dotted `path`, in-memory `shape`, dtype `policy`: a dtype's name, or "model"."""

    path: str
    shape: tuple[int, ...]
    policy: str
    sources: tuple[Source, ...]
    transposed: bool = False

    def oriented(self, array: Any) -> Any:
        """`array` (of `shape`) with matrices as a checkpoint stores them, [.., out, in]; a view."""
        return array.swapaxes(-1, -2) if self.transposed else array


def expected_params(
    config: ModelConfig, include_mtp: bool, *, stored: bool = False
) -> dict[str, tuple[tuple[int, ...], str]]:
    """{path: (shape, dtype)} of every parameter; the dtype "model" is the engine's. `stored`: see `stored_params`."""
    params = released_params(config, include_mtp)
    return {p.path: (p.shape, p.policy) for p in (stored_params(config, params) if stored else params)}


def released_params(config: ModelConfig, include_mtp: bool) -> list[Param]:
    """Every parameter with the released tensor names."""
    d, v, h = config.hidden_size, config.vocab_size, config.hc_mult
    out = [
        Param("embed.embedding", (v, d), "model", (Source("embed.weight", (v, d), SourceKind.FLOAT),)),
        _kernel("head.kernel", "head.weight", v, d, SourceKind.FLOAT),
        _norm("norm", "norm", d),
        *_hyper("hc_head", "hc_head", h, h * d, 1),
    ]
    for i, kind in enumerate(config.layer_kinds):
        out += _layer(config, f"layers.{i}.", f"layers.{i}.", kind, hashed=i < config.num_hash_layers)
    if include_mtp:
        out += [
            *(_norm(f"mtp.{name}", f"mtp.0.{name}", d) for name in ("enorm", "hnorm", "norm")),
            *(_kernel(f"mtp.{name}.kernel", f"mtp.0.{name}.weight", d, d) for name in ("e_proj", "h_proj")),
            *_hyper("mtp.hc_head", "mtp.0.hc_head", h, h * d, 1),
            *_layer(config, "mtp.block.", "mtp.0.", LayerKind.SLIDING, hashed=False),
        ]
    return out


def stored_params(config: ModelConfig, params: list[Param]) -> list[Param]:
    """`params` with every quantised weight as two of them, its codes and its scale, as `config` says it is stored.

    The model's matrices are [in, out]; codes and scales are those of the checkpoint with the axes swapped, and packed
    along `in`. Raises ConfigError where a weight is not of whole tiles.
    """
    formats = {SourceKind.LINEAR: config.quant_method, SourceKind.EXPERT: config.expert_format}
    if config.expert_format and any(p.sources[0].kind is SourceKind.FLOAT for p in params if ".ffn.experts." in p.path):
        raise ConfigError(
            "weight_format='stored' cannot keep transformers' fused experts, which have no quantised form: "
            "use weight_format='widened'"
        )
    out = []
    for param in params:
        form = formats.get(param.sources[0].kind)
        out += [param] if form is None else _codes_and_scale(param, form)
    return out


def _codes_and_scale(param: Param, form: str) -> tuple[Param, Param]:
    *stack, n_in, n_out = param.shape
    # A weight is made of pieces along `out` (gate and up, groups), and a mesh may cut it: all at whole tiles of scales.
    slices = [i for s in param.sources for i in s.index if isinstance(i, slice)]
    piece = slices[0].stop if slices else n_out
    fp4 = form == "fp4"
    tile = (quant.FP4_BLOCK, 1) if fp4 else (quant.FP8_BLOCK, quant.FP8_BLOCK)
    if n_in % tile[0] or piece % tile[1]:
        raise ConfigError(
            f"weight_format='stored' needs {param.path} to be of whole tiles of {tile[0]} x {tile[1]}, which share a "
            f"scale, and it is {n_in} x {piece}: use weight_format='widened'"
        )

    def in_tiles(i: Any) -> Any:
        return slice(i.start // tile[1], i.stop // tile[1]) if isinstance(i, slice) else i

    codes = tuple(dataclasses.replace(s, kind=SourceKind.CODES) for s in param.sources)
    scales = (dataclasses.replace(s, kind=SourceKind.SCALE, index=tuple(map(in_tiles, s.index))) for s in param.sources)
    shape = (*stack, n_in // 2, n_out) if fp4 else param.shape
    path = param.path.removesuffix(".kernel")
    return (
        dataclasses.replace(param, shape=shape, policy="int8" if fp4 else "float8_e4m3fn", sources=codes),
        Param(
            f"{path}.scale" if path != param.path else f"{path}_scale",
            (*stack, n_in // tile[0], n_out // tile[1]),
            "uint8" if fp4 else "float32",
            tuple(scales),
            param.transposed,
        ),
    )


def _layer(config: ModelConfig, path: str, name: str, kind: LayerKind, *, hashed: bool) -> Iterator[Param]:
    d, h = config.hidden_size, config.hc_mult
    for site in ("attn", "ffn"):
        yield _norm(f"{path}{site}_norm", f"{name}{site}_norm", d)
        yield from _hyper(f"{path}hc_{site}", f"{name}hc_{site}", (2 + h) * h, h * d, 3)
    yield from _attention(config, f"{path}attn.", f"{name}attn.", kind)
    yield from _moe(config, f"{path}ffn.", f"{name}ffn.", hashed)


def _attention(config: ModelConfig, path: str, name: str, kind: LayerKind) -> Iterator[Param]:
    d, q, width, heads = config.hidden_size, config.q_lora_rank, config.head_dim, config.num_attention_heads
    groups, rank = config.o_groups, config.o_lora_rank
    group_in = heads * width // groups
    yield _float32(f"{path}sink", f"{name}attn_sink", (heads,))
    yield _kernel(f"{path}wq_a.kernel", f"{name}wq_a.weight", q, d)
    yield _norm(f"{path}q_norm", f"{name}q_norm", q)
    yield _kernel(f"{path}wq_b.kernel", f"{name}wq_b.weight", heads * width, q)
    yield _kernel(f"{path}wkv.kernel", f"{name}wkv.weight", width, d)
    yield _norm(f"{path}kv_norm", f"{name}kv_norm", width)
    wo_a = Source(f"{name}wo_a.weight", (groups * rank, group_in), SourceKind.LINEAR)
    yield Param(f"{path}wo_a.kernel", (groups, group_in, rank), "model", (wo_a,), transposed=True)
    yield _kernel(f"{path}wo_b.kernel", f"{name}wo_b.weight", d, groups * rank)
    if kind is LayerKind.SLIDING:
        return
    overlap = 2 if kind is LayerKind.CSA else 1  # overlapping windows have two series per channel
    ratio = config.ratio(kind)
    yield from _compressor(f"{path}compressor.", f"{name}compressor.", d, overlap * width, width, ratio)
    if kind is LayerKind.CSA:
        n, w = config.index_n_heads, config.index_head_dim
        path, name = f"{path}indexer.", f"{name}indexer."
        yield _kernel(f"{path}wq_b.kernel", f"{name}wq_b.weight", n * w, q)
        yield _kernel(f"{path}weights_proj.kernel", f"{name}weights_proj.weight", n, d, SourceKind.FLOAT)
        yield from _compressor(f"{path}compressor.", f"{name}compressor.", d, overlap * w, w, ratio)


def _compressor(path: str, name: str, d: int, channels: int, width: int, ratio: int) -> Iterator[Param]:
    yield _kernel(f"{path}wkv.kernel", f"{name}wkv.weight", channels, d, SourceKind.FLOAT)
    yield _kernel(f"{path}wgate.kernel", f"{name}wgate.weight", channels, d, SourceKind.FLOAT)
    yield _float32(f"{path}ape", f"{name}ape", (ratio, channels))
    yield _norm(f"{path}norm", f"{name}norm", width)


def _moe(config: ModelConfig, path: str, name: str, hashed: bool) -> Iterator[Param]:
    d, f, e = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    gate = Source(f"{name}gate.weight", (e, d), SourceKind.FLOAT)
    yield Param(f"{path}gate.kernel", (d, e), "float32", (gate,), transposed=True)
    if hashed:
        shape = (config.vocab_size, config.num_experts_per_tok)
        yield Param(f"{path}gate.tid2eid", shape, "int32", (Source(f"{name}gate.tid2eid", shape, SourceKind.IDS),))
    else:
        yield _float32(f"{path}gate.bias", f"{name}gate.bias", (e,))
    w13, w2 = [], []
    for i in range(e):
        expert = f"{name}experts.{i}."
        w13.append(Source(f"{expert}w1.weight", (f, d), SourceKind.EXPERT, (i, slice(0, f))))
        w13.append(Source(f"{expert}w3.weight", (f, d), SourceKind.EXPERT, (i, slice(f, 2 * f))))
        w2.append(Source(f"{expert}w2.weight", (d, f), SourceKind.EXPERT, (i,)))
    yield Param(f"{path}experts.w13", (e, d, 2 * f), "model", tuple(w13), transposed=True)
    yield Param(f"{path}experts.w2", (e, f, d), "model", tuple(w2), transposed=True)
    f *= config.n_shared_experts
    path, name = f"{path}shared_experts.", f"{name}shared_experts."
    halves = tuple(
        Source(f"{name}{w}.weight", (f, d), SourceKind.LINEAR, (slice(i * f, (i + 1) * f),))
        for i, w in enumerate(("w1", "w3"))
    )
    yield Param(f"{path}w13.kernel", (d, 2 * f), "model", halves, transposed=True)
    yield _kernel(f"{path}w2.kernel", f"{name}w2.weight", d, f)


def _kernel(path: str, name: str, n_out: int, n_in: int, kind: SourceKind = SourceKind.LINEAR) -> Param:
    return Param(path, (n_in, n_out), "model", (Source(name, (n_out, n_in), kind),), transposed=True)


def _norm(path: str, name: str, width: int) -> Param:
    source = Source(f"{name}.weight", (width,), SourceKind.FLOAT)
    return Param(f"{path}.scale", (width,), "float32", (source,))


def _float32(path: str, name: str, shape: tuple[int, ...]) -> Param:
    return Param(path, shape, "float32", (Source(name, shape, SourceKind.F32),))


def _hyper(path: str, name: str, rows: int, width: int, scales: int) -> Iterator[Param]:
    for part, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (scales,))):
        yield _float32(f"{path}.{part}", f"{name}_{part}", shape)


# transformers' in-memory names, without the leading "model.": top level, then inside a layer.
_TOP = {
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{site}_{part}": f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}


def is_transformers_naming(names: set[str]) -> bool:
    """Whether tensor `names`, without "model.", follow transformers instead of the release."""
    return "embed_tokens.weight" in names or "lm_head.weight" in names


def transformers_params(config: ModelConfig, include_mtp: bool) -> list[Param]:
    """Every parameter with transformers' names; it has none for MTP, whose tensors keep the released ones."""
    out = []
    for p in released_params(config, include_mtp):
        sources = p.sources
        if p.path.startswith("layers.") and ".experts." in p.path:
            layer, _, which = p.path.rpartition(".ffn.experts.")
            fused = {"w13": "gate_up_proj", "w2": "down_proj"}[which]
            e, n_in, n_out = p.shape
            # Fused experts have no quantised form.
            sources = (Source(f"{layer}.mlp.experts.{fused}", (e, n_out, n_in), SourceKind.FLOAT),)
        elif not p.path.startswith("mtp."):
            sources = tuple(Source(_transformers_name(s.name), s.shape, s.kind, s.index) for s in sources)
        out.append(Param(p.path, p.shape, p.policy, sources, p.transposed))
    return out


def _transformers_name(released: str) -> str:
    if released in _TOP:
        return _TOP[released]
    _, index, rest = released.split(".", 2)
    return f"layers.{index}.{_IN_LAYER[rest]}"
