"""Few promises, all kept: for chats that people wait for, to whom slow is worse than refused.

Short requests come first, and long ones get little while there are others. A third of the latency targets and 15 % of
the pages stay free for peaks; who would wait longer than 2 s is refused at once, with the time to come again, and under
load answers get shorter before anyone is refused.
"""

CHANGES = {
    "scheduler": {
        "scheduling_policy": "shortest",
        "max_num_waiting": 64,
        "preemption_threshold": 0.85,
        "warm": {"share": 0.7, "budget_share": 0.5},
        "cold": {"share": 0.5, "budget_share": 0.25},
    },
    "feedback": {"target_ttft_ms": 500.0, "target_itl_ms": 50.0, "headroom": 0.33},
    "overload": {"max_predicted_wait_s": 2.0, "enable_degradation": True, "degrade_after_s": 2.0},
}
