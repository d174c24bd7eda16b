"""All the throughput there is: for evaluations, batch jobs and agents, which wait for the whole and not for a token.

First come, first served from a long queue; pages are used to the last one, long prompts as freely as short ones. No
latency target but a gap between tokens at which streams would look broken, and nothing is shortened under load.
"""

CHANGES = {
    "scheduler": {
        "scheduling_policy": "fcfs",
        "max_num_waiting": 4096,
        "preemption_threshold": 1.0,
        "warm": {"share": 1.0, "budget_share": 1.0},
        "cold": {"share": 1.0, "budget_share": 1.0},
    },
    "feedback": {"target_ttft_ms": 0.0, "target_itl_ms": 500.0, "headroom": 0.05},
    "overload": {"max_predicted_wait_s": 120.0, "enable_degradation": False},
}
