"""A calibrated machine with round rates."""

from typing import Any

from config.workspace.machine import (
    AdamStep,
    Attention,
    Generation,
    Loop,
    Machine,
    Passes,
    Product,
    Sampling,
    StageProcess,
    Stream,
    Vocabulary,
)


def machine(**changes: Any) -> Machine:
    """Products at 100 GFLOP/s, streams at 10 GB/s, attention at 20 GFLOP/s."""
    content: dict[str, Any] = {
        "name": "cpu",
        "processor": "a test",
        "threads": 1,
        "memory_bytes": 8 * 2**30,
        "usable_bytes": 8 * 2**30,
        "torch": "2.13.0",
        "date": "2026-11-21",
        "seconds": 30.0,
        "products": tuple(
            Product(dtype="fp32", rows=rows, width=width, flops_per_second=1e11)
            for rows in (1, 2048)
            for width in (64, 1024)
        ),
        "streams": (
            Stream(bytes=2**14, bytes_per_second=1e10),
            Stream(bytes=2**26, bytes_per_second=1e10),
        ),
        "attention": (
            Attention(
                tokens=64,
                head_dim=32,
                forward_flops_per_second=2e10,
                training_flops_per_second=2e10,
            ),
        ),
        "passes": (
            Passes(
                width=32,
                layers=2,
                heads=2,
                mlp_width=64,
                sequences=1,
                tokens=8,
                forward_seconds=1e-3,
                training_seconds=3e-3,
            ),
            Passes(
                width=96,
                layers=2,
                heads=4,
                mlp_width=256,
                sequences=64,
                tokens=32,
                forward_seconds=0.02,
                training_seconds=0.06,
            ),
        ),
        "vocabulary": (
            Vocabulary(
                tokens=1024, vocab=512, width=128, forward_seconds=3e-3, training_seconds=1e-2
            ),
        ),
        "sampling": (
            Sampling(rows=8, vocab=512, width=256, product_seconds=4e-5, draw_seconds=2e-4),
        ),
        "generation": (
            Generation(
                width=96,
                layers=2,
                heads=4,
                mlp_width=256,
                vocab=512,
                sequences=128,
                prompt_tokens=16,
                new_tokens=12,
                seconds=0.06,
            ),
        ),
        "optimizer": (AdamStep(parameters=1_000_000, seconds=1e-3),),
        "decode_step_seconds": 1e-3,
        "stages": {
            name: StageProcess(
                imports_seconds=5.0,
                start_seconds=6.0,
                step_seconds=5e-3,
                after_imports_bytes=500 * 2**20,
            )
            for name in ("sft", "ppo")
        },
        "loop": Loop(
            width=128,
            layers=4,
            heads=4,
            mlp_width=384,
            vocab=320,
            sequences=32,
            prompt_tokens=20.0,
            response_tokens=32,
            micro_batch_tokens=1024,
            epochs=2,
            mini_batches=2,
            rollout_seconds=0.5,
            scoring_seconds=0.2,
            update_seconds=0.5,
            trunks=(
                Passes(
                    width=96,
                    layers=2,
                    heads=4,
                    mlp_width=256,
                    sequences=64,
                    tokens=32,
                    forward_seconds=0.02,
                    training_seconds=0.06,
                ),
            ),
        ),
    }
    return Machine(**(content | changes))
