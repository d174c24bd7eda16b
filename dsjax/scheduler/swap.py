"""Whether a preempted request's state is kept, to come back from the host, or computed again.  [no jax]"""

from __future__ import annotations

WEIGHT = 0.2  # of the latest step in the mean


class SwapCosts:
    """Chooses by what steps and transfers have taken so far; `mode` is SchedulerConfig.preemption_mode."""

    def __init__(self, mode: str):
        self.mode = mode
        self.tokens_per_s = 0.0  # that steps with prompts compute; 0 before the first
        self.bytes_per_s = 0.0  # that a download brings; 0 before the first

    def step(self, step_s: float, num_tokens: int, num_rows: int) -> None:
        """Notes a step of so many tokens. Those with a token a row do not show what computing many takes."""
        if num_tokens > num_rows and step_s > 0:
            rate = num_tokens / step_s
            self.tokens_per_s += (rate - self.tokens_per_s) * (WEIGHT if self.tokens_per_s else 1)

    def swaps(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether to move `num_bytes` down and up again rather than compute `num_tokens` tokens again.

        While either rate is unknown `auto` moves, and so learns what it takes.
        """
        if self.mode != "auto":
            return self.mode == "swap"
        if not self.tokens_per_s or not self.bytes_per_s:
            return True
        return 2 * num_bytes / self.bytes_per_s < num_tokens / self.tokens_per_s
