"""Configuration: frozen dataclasses, checked when made, changed only through `override`.  [no jax]

Field names are those of DeepSeek-V4's config.json for the model and vLLM's flags for the rest.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsjax.config_fields import C, at_least, check, one_of, override
from dsjax.config_json import check_fields, read_object
from dsjax.errors import ConfigError
from dsjax.serving_config import FeedbackConfig, OverloadConfig, SchedulerConfig, TierConfig
from pallas_kernels.entry_format import KEY_FORMATS, LATENT_FORMATS


class LayerKind(enum.Enum):
    """What a layer attends to besides its sliding window."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"  # entries chosen by an indexer; windows overlap
    HCA = "heavily_compressed_attention"  # every entry


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN frequencies of the compress rope (rope_scaling in config.json)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A DeepSeek-V4 model: every number its forward pass needs, whichever config dialect it came from."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int = 1
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float  # 0 is no clamp
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnConfig | None = None
    max_position_embeddings: int
    layer_kinds: tuple[LayerKind, ...]  # one per decoder layer, MTP not listed
    csa_ratio: int = 4
    hca_ratio: int = 128
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (1,)
    dtype: str = "bfloat16"  # of the checkpoint's unquantised weights
    quant_method: str | None = None  # "fp8": linears are F8_E4M3 with 128x128 scales
    expert_dtype: str | None = None  # "fp4": experts are packed FP4 with 32-wide scales

    def __post_init__(self):
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise ConfigError(message)

        for name in (
            "vocab_size hidden_size num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups o_lora_rank "
            "moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok sliding_window "
            "hc_mult hc_sinkhorn_iters max_position_embeddings csa_ratio hca_ratio"
        ).split():
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        check(len(self.layer_kinds) >= 1, "num_hidden_layers=0 must be at least 1")
        check(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={self.qk_rope_head_dim} must be even")
        check(
            self.qk_rope_head_dim <= self.head_dim,
            f"qk_rope_head_dim={self.qk_rope_head_dim} must be at most head_dim={self.head_dim}",
        )
        check(
            self.num_attention_heads % self.o_groups == 0,
            f"o_groups={self.o_groups} must divide num_attention_heads={self.num_attention_heads}",
        )
        check(
            self.num_experts_per_tok <= self.n_routed_experts,
            f"num_experts_per_tok={self.num_experts_per_tok} must be at most n_routed_experts={self.n_routed_experts}",
        )
        check(
            0 <= self.num_hash_layers <= self.num_hidden_layers,
            f"num_hash_layers={self.num_hash_layers} must be in [0, num_hidden_layers={self.num_hidden_layers}]",
        )
        check(
            self.num_nextn_predict_layers in (0, 1),
            f"num_nextn_predict_layers={self.num_nextn_predict_layers} must be 0 or 1",
        )
        if LayerKind.CSA in self.layer_kinds:
            check(
                self.index_n_heads >= 1 and self.index_topk >= 1 and self.index_head_dim >= self.qk_rope_head_dim,
                f"index_n_heads={self.index_n_heads}, index_topk={self.index_topk} must be at least 1 and "
                f"index_head_dim={self.index_head_dim} at least qk_rope_head_dim={self.qk_rope_head_dim}",
            )

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def expert_format(self) -> str | None:
        """How the checkpoint's routed experts are stored: "fp4", "fp8" (-Base checkpoints) or None, unquantised."""
        return "fp4" if self.expert_dtype == "fp4" else self.quant_method

    def widened(self) -> ModelConfig:
        """The same network with no weight quantised."""
        return dataclasses.replace(self, quant_method=None, expert_dtype=None)

    def ratio(self, kind: LayerKind) -> int:
        """Tokens per compressed entry; 0 for a sliding layer."""
        return {LayerKind.SLIDING: 0, LayerKind.CSA: self.csa_ratio, LayerKind.HCA: self.hca_ratio}[kind]

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Reads `config.json` (either dialect) in a checkpoint folder."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ConfigError(f"model={str(path)!r} has no config.json")
        raw = read_object(file)
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Builds the config from a config.json in DeepSeek's or in transformers' dialect.

        Raises ConfigError for another architecture, a field that is missing or not what it must be, or a feature that
        V4 does not have.
        """

        def need(name: str) -> Any:
            if raw.get(name) is None:
                raise ConfigError(f"config.json lacks {name!r}")
            return raw[name]

        model_type = raw.get("model_type", "deepseek_v4")
        if model_type != "deepseek_v4":
            raise ConfigError(f"model_type={model_type!r} is not supported: dsjax serves 'deepseek_v4'")
        for name, allowed in _FIXED.items():
            if name in raw and raw[name] not in allowed:
                raise ConfigError(f"{name}={raw[name]!r} is not a DeepSeek-V4 model: it must be {allowed[0]!r}")
        check_fields(raw)
        num_layers = need("num_hidden_layers")
        num_nextn = raw.get("num_nextn_predict_layers") or 0
        kinds, csa_ratio, hca_ratio = _layer_kinds(raw, num_layers)
        head_dim = need("head_dim")
        rope_dim = raw.get("qk_rope_head_dim")
        if rope_dim is None:
            rope_dim = round(head_dim * need("partial_rotary_factor"))
        rope = raw.get("rope_parameters") or {}
        main, compress = rope.get("main") or {}, rope.get("compress") or {}
        scaling = compress if "compress" in rope else raw.get("rope_scaling")
        eos = raw.get("eos_token_id", 1)
        quant = raw.get("quantization_config") or {}
        if quant and (quant.get("quant_method"), quant.get("weight_block_size", [128, 128])) != ("fp8", [128, 128]):
            raise ConfigError(
                f"quantization_config={quant!r} is not supported: fp8 with weight_block_size [128, 128] is"
            )
        has_csa = LayerKind.CSA in kinds
        mlp_types = raw.get("mlp_layer_types")
        if mlp_types is not None:
            num_hash = sum(t == "hash_moe" for t in mlp_types)
            if list(mlp_types) != ["hash_moe"] * num_hash + ["moe"] * (num_layers - num_hash):
                raise ConfigError(
                    f"mlp_layer_types={mlp_types} must be hash_moe layers, then moe layers, {num_layers} in all"
                )
        else:
            num_hash = need("num_hash_layers")
        return cls(
            **{name: need(name) for name in _PLAIN},
            **{name: raw[name] for name in _OPTIONAL if raw.get(name) is not None},
            head_dim=head_dim,
            qk_rope_head_dim=rope_dim,
            index_n_heads=need("index_n_heads") if has_csa else raw.get("index_n_heads") or 0,
            index_head_dim=need("index_head_dim") if has_csa else raw.get("index_head_dim") or 0,
            index_topk=need("index_topk") if has_csa else raw.get("index_topk") or 0,
            swiglu_limit=raw.get("swiglu_limit") or 0.0,
            num_hash_layers=num_hash,
            rope_theta=main.get("rope_theta") or raw.get("rope_theta") or 10000.0,
            compress_rope_theta=compress.get("rope_theta") or raw.get("compress_rope_theta") or 160000.0,
            yarn=_yarn(scaling),
            layer_kinds=kinds,
            csa_ratio=csa_ratio,
            hca_ratio=hca_ratio,
            num_nextn_predict_layers=num_nextn,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,) if eos is not None else (),
            dtype=raw.get("torch_dtype") or raw.get("dtype") or "bfloat16",
            quant_method=quant.get("quant_method"),
            expert_dtype=raw.get("expert_dtype"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model in the released dialect; `from_dict` reads it back to an equal config."""
        ratios = [self.ratio(kind) for kind in self.layer_kinds] + [0] * self.num_nextn_predict_layers
        out: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            **{name: getattr(self, name) for name in (*_PLAIN, *_OPTIONAL)},
            **{
                name: getattr(self, name)
                for name in (
                    "head_dim qk_rope_head_dim index_n_heads index_head_dim index_topk swiglu_limit num_hash_layers "
                    "num_hidden_layers rope_theta compress_rope_theta num_nextn_predict_layers bos_token_id"
                ).split()
            },
            **{name: allowed[0] for name, allowed in _FIXED.items()},
            "eos_token_id": list(self.eos_token_ids) if len(self.eos_token_ids) != 1 else self.eos_token_ids[0],
            "torch_dtype": self.dtype,
            "compress_ratios": ratios,
        }
        if (self.csa_ratio, self.hca_ratio) != (4, 128):
            out["compress_rates"] = {LayerKind.CSA.value: self.csa_ratio, LayerKind.HCA.value: self.hca_ratio}
            out["layer_types"] = [kind.value for kind in self.layer_kinds]
        if self.yarn is not None:
            out["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(self.yarn)}
        if self.quant_method is not None:
            out["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": self.quant_method,
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            }
        if self.expert_dtype is not None:
            out["expert_dtype"] = self.expert_dtype
        return out


_PLAIN = (
    "vocab_size hidden_size num_attention_heads q_lora_rank o_groups o_lora_rank moe_intermediate_size "
    "n_routed_experts num_experts_per_tok routed_scaling_factor sliding_window hc_mult max_position_embeddings"
).split()
_OPTIONAL = "n_shared_experts hc_sinkhorn_iters hc_eps rms_norm_eps".split()
# What V4 fixes; another value means another model, and serving it would give wrong text without an error.
_FIXED: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
}


def _layer_kinds(raw: Mapping[str, Any], num_layers: int) -> tuple[tuple[LayerKind, ...], int, int]:
    """(kind of each layer, CSA ratio, HCA ratio) from `layer_types` or `compress_ratios`."""
    rates = raw.get("compress_rates") or {}
    csa, hca = rates.get(LayerKind.CSA.value, 4), rates.get(LayerKind.HCA.value, 128)
    types = raw.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise ConfigError(f"layer_types has {len(types)} entries for num_hidden_layers={num_layers}")
        try:
            return tuple(LayerKind(t) for t in types), csa, hca
        except ValueError as error:
            raise ConfigError(f"layer_types={types}: {error}") from error
    ratios = raw.get("compress_ratios")
    if ratios is None:
        raise ConfigError("config.json lacks 'compress_ratios' (or 'layer_types')")
    if len(ratios) < num_layers:
        raise ConfigError(f"compress_ratios has {len(ratios)} entries for num_hidden_layers={num_layers}")
    by_ratio = {0: LayerKind.SLIDING, csa: LayerKind.CSA, hca: LayerKind.HCA}
    unknown = [r for r in ratios[:num_layers] if r not in by_ratio]
    if unknown:
        raise ConfigError(f"compress_ratios holds {unknown[0]}: a DeepSeek-V4 layer has 0, {csa} or {hca}")
    return tuple(by_ratio[r] for r in ratios[:num_layers]), csa, hca


def _yarn(scaling: Mapping[str, Any] | None) -> YarnConfig | None:
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type={kind!r} is not supported: 'yarn' or none")
    given = {f.name: scaling[f.name] for f in dataclasses.fields(YarnConfig) if scaling.get(f.name) is not None}
    lacks = next((name for name in ("factor", "original_max_position_embeddings") if name not in given), None)
    if lacks is not None:
        raise ConfigError(f"rope_scaling lacks {lacks!r}")
    return YarnConfig(**given)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged cache.

    `block_size` is the number of entries of a WINDOW, CSA or INDEX_KEY page on a device (an HCA page has a quarter of
    it); a page spans `kv_parallel` devices. `num_gpu_blocks_override` fixes the number of tokens the compressed pools
    hold, in pages of `block_size` x `kv_parallel` tokens; 0 sizes them for `max_num_seqs` requests of `max_model_len`,
    at most `cache_memory_bytes` a device.
    """

    block_size: int = 64
    enable_prefix_caching: bool = True
    prefix_unit_tokens: int = 128  # a hit is counted in these; also where short prompts leave snapshots
    snapshot_interval_tokens: int = 2048  # long prompts leave a snapshot this often
    num_snapshots: int = 64  # state slots kept for prefix snapshots
    num_gpu_blocks_override: int = 0
    cache_memory_bytes: int = 4 << 30
    kv_cache_dtype: str = "auto"  # auto (the activations'), float32, bfloat16, int8, fp8, fp8_fp4 (fp4 index keys)
    window_cache_dtype: str = "auto"  # of window entries alone; auto is kv_cache_dtype
    index_cache_dtype: str = "auto"  # of index keys alone, also fp4; auto is kv_cache_dtype

    def entry_format(self, kind: str, dtype: str) -> str:
        """The format of entries of a kind (window, csa, index_key or hca); `dtype` is the activations'."""
        own = {"window": self.window_cache_dtype, "index_key": self.index_cache_dtype}.get(kind, "auto")
        if own != "auto":
            return own
        if self.kv_cache_dtype == "auto":
            return dtype
        latent, _, key = self.kv_cache_dtype.partition("_")
        return key or latent if kind == "index_key" else latent

    def __post_init__(self):
        at_least(self, 1, "block_size prefix_unit_tokens snapshot_interval_tokens cache_memory_bytes")
        at_least(self, 0, "num_snapshots num_gpu_blocks_override")
        one_of(self, "kv_cache_dtype", ("auto", *LATENT_FORMATS, "fp8_fp4"))
        one_of(self, "window_cache_dtype", ("auto", *LATENT_FORMATS))
        one_of(self, "index_cache_dtype", ("auto", *KEY_FORMATS))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one engine is spread over devices; with every size 1 it is the same program on one.

    A data shard has requests, pages and page tables of its own. Inside it `tensor_parallel_size` devices split heads,
    output groups, vocabulary and experts' widths; `kv_parallel` of them, which divides their number, also split the
    cache, 1 keeps a whole copy on each.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1  # stages of layers
    kv_parallel: int = 1  # parts that every page is dealt into, entry by entry
    expert_parallel: bool = False  # whole experts over the whole mesh, instead of a slice of each over a data shard
    num_microbatches: int = 0  # parts of a step that are in different stages at a time; 0: pipeline_parallel_size

    def __post_init__(self):
        at_least(self, 1, "tensor_parallel_size data_parallel_size pipeline_parallel_size kv_parallel")
        at_least(self, 0, "num_microbatches")
        if self.tensor_parallel_size % self.kv_parallel:
            raise ConfigError(
                f"kv_parallel={self.kv_parallel} must divide tensor_parallel_size={self.tensor_parallel_size}: the "
                "cache is split over the devices of a data shard"
            )

    @classmethod
    def of(cls, mesh: str, **options: Any) -> ParallelConfig:
        """With the sizes in one word, see `mesh_sizes`; `options` are other fields."""
        return cls(**mesh_sizes(mesh), **options)

    @property
    def num_devices(self) -> int:
        return self.pipeline_parallel_size * self.data_parallel_size * self.tensor_parallel_size


MESH_PATH = "parallel.mesh"  # what `override_all` takes for the sizes in one word; no field has this name
_MESH_FIELDS = {"data": "data_parallel_size", "model": "tensor_parallel_size", "stage": "pipeline_parallel_size"}


def mesh_sizes(mesh: str) -> dict[str, int]:
    """The sizes of ParallelConfig that "data:2,model:4" or "stage:2,data:4" names. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for part in filter(None, mesh.split(",")):
        name, _, size = part.strip().partition(":")
        field_name = _MESH_FIELDS.get(name)
        if field_name is None or field_name in sizes or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"mesh={mesh!r} must name each of {', '.join(_MESH_FIELDS)} once at most, with a size of at least 1, "
                "such as 'data:2,model:4'"
            )
        sizes[field_name] = int(size)
    return sizes


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes that run one engine together, each with its own devices; process 0 schedules and serves."""

    coordinator_address: str = ""  # host:port of process 0, the same for all; "" is one process alone
    num_processes: int = 1
    process_id: int = 0
    peer_timeout_s: float = 10.0  # a process not heard of for so long is dead, and with it the engine
    key_file: str = ""  # a secret that all share, without which none can join; "" is for networks that are trusted

    def __post_init__(self):
        at_least(self, 1, "num_processes")
        if not 0 <= self.process_id < self.num_processes:
            raise ConfigError(f"process_id={self.process_id} must be in [0, num_processes={self.num_processes})")
        if self.num_processes > 1 and not self.coordinator_address:
            raise ConfigError(f"num_processes={self.num_processes} needs coordinator_address, host:port of process 0")
        if not 0 < self.peer_timeout_s <= 3600:
            raise ConfigError(f"peer_timeout_s={self.peer_timeout_s} must be in (0, 3600]")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: str  # checkpoint folder, or "dsjax-nano" for the embedded one
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    weight_format: str = "auto"  # auto (widened on the CPU, else stored), stored (FP8, FP4 and scales), widened (dtype)
    kernels: str = "auto"  # auto (the device's own Pallas kernels, where it has them), jnp (plain JAX in their place)
    dtype: str = "auto"  # of weights and activations: auto (float32 on CPU, else bfloat16), float32, bfloat16
    tokenizer: str = ""  # folder or file; "" is the model's folder
    seed: int = 0  # draws the seeds of requests that give none
    compilation_cache_dir: str = "~/.cache/dsjax/xla"  # "" turns it off
    fail_on_recompile: bool = False

    def __post_init__(self):
        one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        one_of(self, "weight_format", ("auto", "stored", "widened"))
        one_of(self, "kernels", ("auto", "jnp"))
        if not self.model:
            raise ConfigError("model='' must be a checkpoint folder or 'dsjax-nano'")
        host_bytes, cache, mode = self.tiers.host_cache_bytes, self.cache, self.scheduler.preemption_mode
        check(
            not host_bytes or self.distributed.num_processes == 1,
            f"host_cache_bytes={host_bytes} needs num_processes=1, and not {self.distributed.num_processes}: the "
            "cache's tiers are one process's memory",
        )
        check(
            not host_bytes or (cache.enable_prefix_caching and cache.num_snapshots > 0),
            f"host_cache_bytes={host_bytes} needs enable_prefix_caching and num_snapshots={cache.num_snapshots} of at "
            "least 1: tiers keep what the prefix cache gives up",
        )
        check(mode != "swap" or host_bytes > 0, "preemption_mode='swap' needs host_cache_bytes, where states go")


def override_all(config: C, changes: Sequence[tuple[str, str]]) -> C:
    """Applies (path, value) changes in turn; fields that limit each other may come in either order.

    A path that ends in `mesh` stands for the sizes it names. Raises as `override` does, and if mesh and a size differ.
    """
    pending = _with_sizes(changes)
    while pending:
        errors, later = [], []
        for path, value in pending:
            try:
                config = override(config, path, value)
            except ConfigError as error:
                errors.append(error)
                later.append((path, value))
        if len(later) == len(pending):
            raise errors[0]
        pending = later
    return config


def _with_sizes(changes: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The changes, with `mesh` written out."""
    out: list[tuple[str, str]] = []
    given = dict(changes)
    for path, value in changes:
        section, _, name = path.rpartition(".")
        if name != "mesh":
            out.append((path, value))
            continue
        for field_name, size in mesh_sizes(value).items():
            full = f"{section}.{field_name}" if section else field_name
            if given.get(full, str(size)) != str(size):
                raise ConfigError(f"mesh={value!r} and {field_name}={given[full]} differ: give one of them")
            out.append((full, str(size)))
    return out
