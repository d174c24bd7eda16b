"""Configs of what decides who is served when: scheduler, paths, tenants, feedback, overload, cache tiers.  [no jax]"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsjax.config_fields import at_least, check, one_of, within

POLICIES = ("fcfs", "priority", "shortest")
PREEMPTION_MODES = ("auto", "recompute", "swap")


@dataclass(frozen=True, kw_only=True)
class PathConfig:
    """Limits of the requests of one length class on each data shard; prompt and expected output count.

    `share` is of the rows and of the pages of each pool; it and `max_num_seqs` are of this path and colder ones
    together, and so cannot limit the hottest. A path with nothing running may always start one request, so that no
    request is too long for its path; what that one holds beyond the share, requests of hotter paths take back.
    """

    max_tokens: int = 0  # shorter requests belong to this path or a hotter one; 0: all that are left
    max_num_seqs: int = 0  # rows; 0: the share of max_num_seqs
    share: float = 1.0
    budget_share: float = 1.0  # of a step's tokens, for prompts, while requests of other paths want some
    chunk_tokens: int = 0  # most prompt tokens of one request in a step; 0: what the budget allows

    def __post_init__(self):
        at_least(self, 0, "max_tokens max_num_seqs chunk_tokens")
        within(self, 0, 1, "share budget_share", open_low=True)


@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """A tenant that gets more or less than others. Requests name theirs; unknown names are tenants of weight 1."""

    name: str
    weight: float = 1.0  # of its turns: tokens served are in proportion to weights while several tenants wait
    max_num_seqs: int = 0  # of its requests that run; 0 is no limit. All limits here are of the whole engine
    max_num_waiting: int = 0  # of its requests that wait; more are refused
    max_cached_tokens: int = 0  # that its prompts and answers keep in the prefix cache
    reserved_seqs: int = 0  # rows that no other tenant takes (headroom of a VIP)

    def __post_init__(self):
        check(1e-6 <= self.weight <= 1e6, f"weight={self.weight} of tenant {self.name!r} must be in [1e-6, 1e6]")
        at_least(self, 0, "max_num_seqs max_num_waiting max_cached_tokens reserved_seqs")
        check(
            not self.max_num_seqs or self.reserved_seqs <= self.max_num_seqs,
            f"reserved_seqs={self.reserved_seqs} of tenant {self.name!r} must be at most its "
            f"max_num_seqs={self.max_num_seqs}",
        )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold, in which order requests get into it, and who gives way.

    `max_num_seqs` and `max_num_batched_tokens` are limits of each data shard, as of each engine of vLLM's data parallel
    ones: with `data_parallel_size` 4, four times as many requests run. `max_num_waiting` is of the whole engine.

    A waiting request's place is its time of arrival plus a handicap in seconds (`policy.handicap_s`): none for `fcfs`;
    `priority_step_s` for each level of priority, for `priority`; that and `length_penalty` for each token, up to
    `max_overtake_s`, for `shortest`. So who arrives more than the difference of the handicaps later stays behind:
    that is the ageing, and the bound on being overtaken.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int = 0  # 0 is the model's max_position_embeddings
    enable_chunked_prefill: bool = True  # off: a prompt enters a step whole, or waits
    max_num_waiting: int = 1024  # the bounded queue; a full one answers RESOURCE_EXHAUSTED
    scheduling_policy: str = "fcfs"  # fcfs, priority, shortest (and priority)
    priority_step_s: float = 60.0  # a request of priority p is overtaken by one of p - 1 that comes so much later
    length_penalty: float = 0.01  # seconds that each token of prompt and expected output counts, for `shortest`
    max_overtake_s: float = 30.0  # most seconds that length counts
    length_groups: float = 0.0  # rows of a step have contexts within this ratio, groups in turn; 0: all rows
    expected_output_tokens: int = 256  # of an answer, until answers have shown their lengths
    batch_wait_s: float = 0.0  # how long a lone request may wait for others before an idle engine starts it
    enable_preemption: bool = True  # off: a request is admitted when the cache can hold all of it
    preemption_threshold: float = 1.0  # part of a pool in use above which requests are preempted, and none admitted
    preemption_mode: str = "auto"  # auto (the cheaper), recompute, swap (to the host's tier of the cache)
    hot: PathConfig = field(default_factory=lambda: PathConfig(max_tokens=8192))
    warm: PathConfig = field(default_factory=lambda: PathConfig(max_tokens=16384, share=0.9, budget_share=0.75))
    cold: PathConfig = field(default_factory=lambda: PathConfig(share=0.8, budget_share=0.5))
    tenants: tuple[TenantConfig, ...] = ()

    def __post_init__(self):
        at_least(self, 1, "max_num_seqs max_num_batched_tokens max_num_waiting expected_output_tokens")
        at_least(self, 0, "max_model_len priority_step_s length_penalty max_overtake_s batch_wait_s")
        one_of(self, "scheduling_policy", POLICIES)
        one_of(self, "preemption_mode", PREEMPTION_MODES)
        within(self, 0, 1, "preemption_threshold", open_low=True)
        check(
            self.length_groups == 0 or self.length_groups > 1,
            f"length_groups={self.length_groups} must be more than 1, the ratio of lengths in a group, or 0",
        )
        check(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
            f"max_num_seqs={self.max_num_seqs}: every running request adds a token to a step",
        )
        check(
            0 < self.hot.max_tokens < self.warm.max_tokens and self.cold.max_tokens == 0,
            f"hot.max_tokens={self.hot.max_tokens}, warm.max_tokens={self.warm.max_tokens} and "
            f"cold.max_tokens={self.cold.max_tokens} must ascend from 1, and the last be 0: cold has all that are left",
        )
        check(
            self.hot.share == 1 and self.hot.max_num_seqs == 0,
            f"hot.share={self.hot.share:g} and hot.max_num_seqs={self.hot.max_num_seqs} must be 1 and 0: what hot "
            "requests and all colder ones hold together is limited by max_num_seqs and the cache alone",
        )
        names = [tenant.name for tenant in self.tenants]
        check(len(set(names)) == len(names), f"tenants names one twice: {', '.join(names)}")
        reserved = sum(tenant.reserved_seqs for tenant in self.tenants)
        check(
            reserved == 0 or reserved < self.max_num_seqs,
            f"reserved_seqs of all tenants are {reserved}, and must leave some of max_num_seqs={self.max_num_seqs}",
        )

    @property
    def paths(self) -> tuple[PathConfig, PathConfig, PathConfig]:
        """Hot, warm, cold."""
        return self.hot, self.warm, self.cold


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """The controller that moves a step's budget and rows so that latencies stay within targets; with none it is off."""

    target_ttft_ms: float = 0.0  # 99th percentile of the time to the first token
    target_itl_ms: float = 0.0  # 99th percentile of the time between two tokens of a request
    headroom: float = 0.2  # part of a target that is kept free for peaks
    feedback_window_s: float = 1.0  # over which percentiles are taken

    def __post_init__(self):
        at_least(self, 0, "target_ttft_ms target_itl_ms")
        within(self, 0, 0.9, "headroom")
        check(self.feedback_window_s > 0, f"feedback_window_s={self.feedback_window_s} must be more than 0")


@dataclass(frozen=True, kw_only=True)
class OverloadConfig:
    """What happens when more arrives than can be served."""

    max_predicted_wait_s: float = 0.0  # longer, or past its deadline, and a request is refused; 0: no limit
    enable_shedding: bool = True  # a full queue gives up its least urgent request for a more urgent new one
    enable_degradation: bool = False  # under load: shorter answers, then smaller chunks, no logprobs, no cold requests
    degrade_after_s: float = 5.0  # of load, for each further mode; and of calm, to take one back
    degraded_max_tokens: int = 256
    breaker_error_rate: float = 0.5  # of latest requests; above it new ones are refused for a time; 1 is off
    breaker_min_requests: int = 20  # ended within breaker_window_s, for their rate to count
    breaker_window_s: float = 10.0
    breaker_open_s: float = 5.0
    step_stall_s: float = 60.0  # a step that takes longer opens the breaker; 0 is off

    def __post_init__(self):
        at_least(self, 0, "max_predicted_wait_s step_stall_s")
        at_least(self, 1, "degraded_max_tokens breaker_min_requests")
        within(self, 0, 1, "breaker_error_rate", open_low=True)
        for name in ("degrade_after_s", "breaker_window_s", "breaker_open_s"):
            check(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be more than 0")


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """Where cached prefixes go that leave the device: host memory (0 bytes turn it off), then files in a folder."""

    host_cache_bytes: int = 0
    disk_cache_dir: str = ""  # "" is no files
    disk_cache_bytes: int = 16 << 30  # of the files there
    host_cache_dtype: str = "auto"  # auto (as on the device), int8 (float entries are rounded)

    def __post_init__(self):
        at_least(self, 0, "host_cache_bytes disk_cache_bytes")
        one_of(self, "host_cache_dtype", ("auto", "int8"))
        check(
            not self.disk_cache_dir or self.host_cache_bytes > 0,
            f"disk_cache_dir={self.disk_cache_dir!r} needs host_cache_bytes: files are read and written there",
        )
        check(
            not self.disk_cache_dir or self.disk_cache_bytes > 0,
            f"disk_cache_dir={self.disk_cache_dir!r} needs disk_cache_bytes of at least 1",
        )
