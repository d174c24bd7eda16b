"""`dsjax-verify DIR`: checks that this machine computes what a checkpoint's recorded outputs say.

Prints one line a prompt and mode. Exit code 0 if all pass, 1 if a logit differs by more than --atol or a greedy token
differs, 2 for a wrong flag or folder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from dsjax.errors import ConfigError
from servers import flags as server_flags

PROGRAM = "dsjax-verify"
USAGE = "dsjax-verify DIR [--mode=full|paged|chunk=N|token ...] [--mesh=data:2,model:4] [--atol=2e-4]"


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return server_flags.run(PROGRAM, lambda: _main(sys.argv if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags.DEFINE_multi_string(
        "mode", None, "full, paged, chunk=N or token; repeatable; default all", flag_values=values
    )
    flags.DEFINE_string(
        "kv_cache_dtype", "auto", "auto (the activations'), float32, bfloat16, int8, fp8, fp8_fp4", flag_values=values
    )
    flags.DEFINE_string("dtype", "float32", "of weights and activations: float32, bfloat16", flag_values=values)
    flags.DEFINE_string(
        "weight_format", "auto", "auto (widened on the CPU, else stored), stored, widened", flag_values=values
    )
    flags.DEFINE_enum(
        "kernels", "auto", ["auto", "jnp"], "the device's own Pallas kernels, or plain JAX", flag_values=values
    )
    server_flags.define_parallel_flags(values)
    flags.DEFINE_float("atol", 2e-4, "largest allowed difference of a logit", flag_values=values)
    flags.DEFINE_string(
        "compilation_cache_dir",
        "~/.cache/dsjax/xla",
        "where compiled programs are kept; empty keeps none",
        flag_values=values,
    )
    folders = server_flags.parse(values, argv, USAGE, positional=True)
    if len(folders) != 1:
        raise ConfigError(f"one checkpoint folder is needed, not {len(folders)}: {USAGE}")
    if not 0 <= values.atol < math.inf:
        raise ConfigError(f"atol={values.atol} must be 0 or more, and finite")
    from dsjax.load import use_compile_cache  # JAX starts here, after the flags were found good
    from dsjax.verify import ALL_MODES, parse_mode, verify

    modes = tuple(values.mode or ALL_MODES)
    for mode in modes:
        parse_mode(mode)
    parallel = server_flags.parallel_config(values)
    if values.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={values.dtype!r} must be one of float32, bfloat16")
    if values.weight_format not in ("auto", "stored", "widened"):
        raise ConfigError(f"weight_format={values.weight_format!r} must be one of auto, stored, widened")
    use_compile_cache(values.compilation_cache_dir)
    failed = 0
    folder = Path(folders[0])
    if not folder.is_dir():
        raise ConfigError(f"{folders[0]!r} is not a folder")
    for result in verify(
        folder,
        modes,
        kv_cache_dtype=values.kv_cache_dtype,
        dtype=values.dtype,
        weight_format=values.weight_format,
        kernels=values.kernels,
        parallel=parallel,
    ):
        passed = result.passes(values.atol)
        failed += not passed
        mtp = "" if result.mtp_difference is None else f"  mtp {result.mtp_difference:.2e}"
        greedy = "equal" if result.greedy_equal else "DIFFERS"
        print(
            f"{'ok  ' if passed else 'FAIL'} {result.mode:10} prompt {result.prompt:<3} {result.num_tokens:5} tokens"
            f"  max |logit difference| {result.difference:.2e}{mtp}  greedy {greedy}",
            flush=True,
        )
    print(f"{PROGRAM}: {'all passed' if not failed else f'{failed} failed'} at atol={values.atol:g}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
