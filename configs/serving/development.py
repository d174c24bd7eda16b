"""For working on dsjax or on a client: starts soon, and says at once what a service would put up with.

Few step shapes, so that little is compiled; a compilation after the warm-up is an error; nothing shortens, sheds or
refuses by itself, and a step may take as long as a debugger wants.
"""

CHANGES = {
    "fail_on_recompile": True,
    "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_num_waiting": 16},
    "overload": {"enable_shedding": False, "enable_degradation": False, "breaker_error_rate": 1.0, "step_stall_s": 0.0},
}
