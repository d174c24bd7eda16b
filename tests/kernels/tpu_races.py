"""TPU kernels on a simulated TPU, whose copies end no sooner than they are waited for: finds what reads too early."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import Target


def run(call, *args: Any, copies: Literal["on_wait", "eager"] = "on_wait") -> Any:
    """call(target, *args), which must have no race. Memory is NaN until it is written.

    A copy that is not waited for never happens; where copies are "eager" it does, and races with what reads it.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as simulation

    simulated: Any = pltpu.InterpretParams(detect_races=True, dma_execution_mode=copies)
    try:
        out = jax.tree.map(np.asarray, call(Target("tpu", "v6e", interpret=simulated), *args))
        assert not simulation.races.races_found, "there is a race"  # JAX 0.12 raises instead
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return out
