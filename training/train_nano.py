"""Trains dsjax-nano on the CPU and writes its checkpoint.

    python -m training.tokenizer --cache DIR
    python -m training.train_nano --cache DIR --minutes 65 --out dsjax/embedded/dsjax-nano

Resumes from the newest state in `--cache`. The schedule follows the clock, so that a busy machine trains for less
tokens and not for longer; `--steps` bounds it too. Logs JSON lines to `train.jsonl` in the cache folder.
"""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import nnx
from tokenizers import Tokenizer
from tqdm import tqdm

from configs.models import MODELS
from dsjax.checkpoint import save_checkpoint
from dsjax.config import ModelConfig
from dsjax.model.transformer import Transformer
from training import corpus, data, forward, optimizer, places

_OUT = flags.DEFINE_string("out", "", "folder to write the checkpoint into; it must hold none")
_MODEL = flags.DEFINE_string("model", "dsjax-nano", "name of a model configuration")
_MINUTES = flags.DEFINE_float("minutes", 65.0, "training time, compilation included, summed over resumed runs")
_STEPS = flags.DEFINE_integer("steps", 100_000, "most steps")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 2048, "tokens of a step")
_LENGTH = flags.DEFINE_integer("length", 512, "tokens of a sequence")
_PEAK = flags.DEFINE_float("peak", 1.0, "multiplies every learning rate; to restart the schedule when training on")
_LONG = flags.DEFINE_float("long", 0.15, "share of the schedule, at its end, with sequences twice as long")
_MTP_WEIGHT = flags.DEFINE_float("mtp_weight", 0.3, "weight of the MTP block's loss")
_INDEX_WEIGHT = flags.DEFINE_float("index_weight", 0.1, "weight of the indexer's loss, which trains the indexer alone")
_BALANCE = flags.DEFINE_float("balance", 0.02, "step of the router biases, times how uneven loads are")
_CAPACITY = flags.DEFINE_float("capacity", 1.5, "slots of an expert, as a multiple of its fair share; more is dropped")
_SAVE_MINUTES = flags.DEFINE_float("save_minutes", 8.0, "time between saved states")
_SEED = flags.DEFINE_integer("seed", 0, "of weights and data order")


def flat(state: nnx.State) -> dict[str, jax.Array]:
    """Dotted path -> value."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def build(config: ModelConfig, counts: np.ndarray, seed: int) -> tuple[Any, dict[str, jax.Array]]:
    """(the model without values, dotted path -> starting value)."""
    model = Transformer(config, nnx.Rngs(seed), with_mtp=True)
    for i, block in enumerate(model.layers):
        if block.ffn.gate.hashed:
            table = data.hash_table(counts, config.n_routed_experts, config.num_experts_per_tok, seed=i)
            block.ffn.gate.tid2eid[...] = jnp.asarray(table)
    graph, state = nnx.split(model)
    return (graph, state), optimizer.starting_values(flat(state), config.hc_mult)


def merge(template: Any, params: dict[str, jax.Array]) -> Transformer:
    graph, state = template
    values = {path: leaf.replace(params[".".join(map(str, path))]) for path, leaf in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(values))


def is_trained(path: str) -> bool:
    """Hash tables are fixed, and router biases follow the loads instead of a gradient."""
    return not path.endswith((".tid2eid", ".gate.bias"))


def losses(
    template: Any, trained: dict, fixed: dict, ids: jax.Array, weights: tuple[float, float], capacity: float | None
) -> tuple[jax.Array, dict[str, Any]]:
    """ids [B, T + 2] -> (loss, its parts and the expert loads)."""
    model = merge(template, {**trained, **fixed})
    run = forward.Run(capacity=capacity)
    kernel = model.head.kernel[...]
    last = forward.streams(model, ids[:, :-2], run)
    main = forward.cross_entropy(forward.hidden(model, last), kernel, ids[:, 1:-1].reshape(-1))
    draft = forward.mtp_hidden(model, last, ids[:, 1:-1], run)
    mtp = forward.cross_entropy(draft, kernel, ids[:, 2:].reshape(-1))
    index = sum(run.index_losses) / max(len(run.index_losses), 1)
    total = main + weights[0] * mtp + weights[1] * index
    return total, {"loss": main, "mtp_loss": mtp, "index_loss": index, "loads": run.loads}


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5, 6))
def train_step(
    static: Any,
    transform: Any,
    weights: tuple[float, float, float],
    capacity: float,
    trained: dict,
    fixed: dict,
    state: Any,
    ids: jax.Array,
    factor: jax.Array,
) -> tuple[dict, dict, Any, dict]:
    """One step; leaves everything as it is if the gradient is not finite."""

    def loss(params: dict) -> tuple[jax.Array, dict]:
        return losses(static.template, params, fixed, ids, weights[:2], capacity)

    gradient, metrics = jax.grad(loss, has_aux=True)(trained)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradient.values()))
    finite = jnp.isfinite(norm)
    updates, new_state = transform.update(gradient, state, trained)
    new = {path: value + optimizer.scale(path) * factor * updates[path] for path, value in trained.items()}
    keep = partial(jax.tree.map, lambda a, b: jnp.where(finite, a, b))
    loads = metrics.pop("loads")
    biased = dict(fixed)
    for layer, load in loads.items():
        path = f"{layer}.ffn.gate.bias"
        if path in biased:
            biased[path] = fixed[path] + weights[2] * jnp.clip(1 - load * load.shape[0], -1, 1)
    metrics |= {"grad_norm": norm, "max_load": jnp.max(jnp.stack([jnp.max(v) for v in loads.values()]))}
    return keep(new, trained), keep(biased, fixed), keep(new_state, state), metrics


class Static:
    """Hashable by identity, so that the model's structure can be a static argument."""

    def __init__(self, template: Any):
        self.template = template


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    start = time.monotonic()
    cache, tokenizer_dir = places.cache(), places.tokenizer()
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    config = MODELS[_MODEL.value]()
    rows = data.Rows(tokenizer, corpus.split(corpus.load(cache))[0], seed=_SEED.value)
    template, params = build(config, rows.counts(config.vocab_size), _SEED.value)
    trained = {path: value for path, value in params.items() if is_trained(path)}
    fixed = {path: value for path, value in params.items() if not is_trained(path)}
    transform = optimizer.make()
    state = transform.init(trained)
    position = {"step": 0, "tokens": 0, "seconds": 0.0}
    manager = ocp.CheckpointManager(cache / "states", options=ocp.CheckpointManagerOptions(max_to_keep=2))
    if manager.latest_step() is not None:
        target = {"trained": trained, "fixed": fixed, "state": state, "position": position}
        saved = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))
        trained, fixed, state, position = (saved[key] for key in ("trained", "fixed", "state", "position"))
        logging.info("resuming at %s", position)
    step, tokens, before = int(position["step"]), int(position["tokens"]), float(position["seconds"])
    weights = (_MTP_WEIGHT.value, _INDEX_WEIGHT.value, _BALANCE.value)
    logging.info("%d parameters, %d tokens an epoch", sum(v.size for v in params.values()), rows.num_tokens)

    def seconds() -> float:
        return before + time.monotonic() - start

    def save() -> None:
        position = {"step": step, "tokens": tokens, "seconds": seconds()}
        tree = {"trained": trained, "fixed": fixed, "state": state, "position": position}
        manager.save(step, args=ocp.args.StandardSave(tree))

    static, length, batches = Static(template), 0, iter(())
    last_save, progress = time.monotonic(), 0.0
    bar = tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}")
    with (cache / "train.jsonl").open("a") as log:
        while True:
            progress = max(seconds() / 60 / _MINUTES.value, step / _STEPS.value)
            if progress >= 1:
                break
            wanted = _LENGTH.value * (2 if progress > 1 - _LONG.value else 1)
            if wanted != length:
                length, batches = wanted, rows.batches(_BATCH_TOKENS.value, wanted, tokens)
            factor = np.float32(_PEAK.value * optimizer.schedule(progress, step))
            trained, fixed, state, metrics = train_step(
                static, transform, weights, _CAPACITY.value, trained, fixed, state, next(batches), factor
            )
            metrics = {name: round(float(value), 4) for name, value in metrics.items()}
            step, tokens = step + 1, tokens + _BATCH_TOKENS.value
            line = {"step": step, "tokens": tokens, "seconds": round(seconds(), 1), "lr": round(float(factor), 4)}
            log.write(json.dumps(line | metrics) + "\n")
            log.flush()
            bar.n = round(100 * progress, 1)
            bar.set_postfix(step=step, loss=metrics["loss"], mtp=metrics["mtp_loss"])
            if time.monotonic() - last_save > 60 * _SAVE_MINUTES.value:
                save()
                last_save = time.monotonic()
    bar.close()
    if manager.latest_step() != step:
        save()
    manager.wait_until_finished()
    if _OUT.value:
        out = Path(_OUT.value)
        save_checkpoint(out, config, {path: np.asarray(v) for path, v in {**trained, **fixed}.items()})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tokenizer_dir / name, out / name)


if __name__ == "__main__":
    app.run(main)
