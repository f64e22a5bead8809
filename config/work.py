"""Sizes of the pieces that stages work in, which plans count."""

NORMALISATION_PAIRS = 2000
"""Training pairs whose scores give a reward model's mean and standard deviation: the standard error of the mean is
then 1/60 of a deviation.
"""
EXAMINED_PAIRS = 5000
"""New pairs that the champion's reward model judges: enough for an interval of 0.013."""
JUDGE_PAIRS = 500
"""Held-out pairs of people on which a judge is judged, at most."""
GAP_SAMPLE = 16
"""Responses per update whose log-probs are recomputed for comparison."""
BUCKET_ELEMENTS = 2**22
"""Gradients are summed over processes in messages of about this size: few calls, and a copy of 16 MiB instead of all
gradients.
"""
CHUNK_LOGITS = 2**22
"""Logits held at once on a CPU, whose caches they should not leave: 16 MiB in fp32."""
BYTES_PER_CHUNK_LOGIT = 1024
"""An accelerator holds a logit for each of these bytes of its memory. A logit and its gradient take 14, so a chunk
takes 1.4% of the device, and products are large enough to keep it busy.
"""
PREFILL_TOKENS = 16_384
"""Tokens of prompts that a rollout reads at once: enough to keep an accelerator busy, while their keys and values lie
there twice, and the activations of a layer.
"""
SPARE_COLUMNS = 32
"""Columns that the cache of a rollout has beyond those in use, when it is allocated: at least this many, or a quarter
more (training/rollout/kv_cache.py).
"""


def cache_columns(prompt: int, longest: int) -> int:
    """Columns that a rollout's cache has when sequences have grown from `prompt` to `longest` tokens."""
    columns = prompt + SPARE_COLUMNS
    while columns < longest:
        columns += 1 + max(SPARE_COLUMNS, (columns + 1) // 4)
    return columns


ONCE, TOKENS, TRAINED, HELD_OUT, ROWS = "once", "tokens", "trained tokens", "held-out tokens", "rows"
PHASE_UNITS = {
    "start": ONCE,
    "read": ROWS,
    "tokenise": TOKENS,
    "summarise": ONCE,
    "train": TOKENS,
    "update": TRAINED,
    "evaluate": HELD_OUT,
    "save": ONCE,
}
"""Phase -> what its time grows with: tokens of its stage's steps, those times the passes of an update, or those of
held-out rows. Every other phase of a stage takes its tokens.
"""
