"""For a service that nobody watches: a bounded queue, feedback, degradation and a host tier of the cache, all on.

Prefixes that leave the device stay in 16 GiB of host memory (one process alone; `tiers.disk_cache_dir` and
`disk_cache_bytes` keep them over a restart too). Targets are loose, those of a chat that is just acceptable: put
`conservative` or `balanced` after it for others.
"""

CHANGES = {
    "scheduler": {"scheduling_policy": "priority", "max_num_waiting": 512, "preemption_threshold": 0.95},
    "feedback": {"target_ttft_ms": 3000.0, "target_itl_ms": 150.0},
    "overload": {"max_predicted_wait_s": 20.0, "enable_degradation": True, "step_stall_s": 30.0},
    "tiers": {"host_cache_bytes": 16 << 30},
}
