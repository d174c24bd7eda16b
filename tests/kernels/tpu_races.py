"""TPU kernels on a simulated TPU, whose copies end no sooner than they are waited for: finds what reads too early."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import Target


def run(call, *args: Any) -> Any:
    """call(target, *args), which must have no race. Memory is NaN until it is written."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulation

    simulated: Any = pltpu.InterpretParams(detect_races=True)
    try:
        out = jax.tree.map(np.asarray, call(Target("tpu", "v6e", interpret=simulated), *args))
        assert not simulation.races.races_found  # JAX 0.12 raises instead
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return out
