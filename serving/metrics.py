"""Metrics for Prometheus at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
VERSION = ["model_version"]
"""The label of what is counted for each model by itself."""


class Metrics:
    """Counters of one front."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("rlhf_requests", "Requests by path and status.", ["path", "status"], registry=registry)
        self.prompt_tokens = Counter(
            "rlhf_prompt_tokens", "Tokens of prompts that were answered.", VERSION, registry=registry
        )
        self.reply_tokens = Counter("rlhf_reply_tokens", "Tokens generated.", VERSION, registry=registry)
        self.words = Counter(
            "rlhf_feedback",
            "What users said of replies, by model: up, down, or better than another.",
            [*VERSION, "rating"],
            registry=registry,
        )
        self.running = Gauge("rlhf_requests_at_work", "Requests that are not answered yet.", registry=registry)
        self.ttft = Histogram(
            "rlhf_time_to_first_token_seconds",
            "Time from a request to the first token of a streamed reply.",
            VERSION,
            buckets=BUCKETS,
            registry=registry,
        )
        self.tpot = Histogram(
            "rlhf_time_per_output_token_seconds",
            "Time per token after the first one of a streamed reply.",
            VERSION,
            buckets=tuple(bucket / 10 for bucket in BUCKETS),
            registry=registry,
        )
