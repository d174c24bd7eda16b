"""For a service with people and programs among its users: short answers stay quick, and long prompts get through.

Latency targets with the usual fifth kept free, 8 % of the pages free for running answers to grow, priorities respected,
and a queue of at most 10 s.
"""

CHANGES = {
    "scheduler": {
        "scheduling_policy": "priority",
        "max_num_waiting": 256,
        "preemption_threshold": 0.92,
        "warm": {"share": 0.85, "budget_share": 0.75},
        "cold": {"share": 0.7, "budget_share": 0.5},
    },
    "feedback": {"target_ttft_ms": 1500.0, "target_itl_ms": 100.0, "headroom": 0.2},
    "overload": {"max_predicted_wait_s": 10.0, "enable_degradation": True, "degrade_after_s": 5.0},
}
