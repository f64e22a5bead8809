"""Sizes of the pieces that stages work in, which plans count."""

NORMALISATION_PAIRS = 2000
"""Training pairs whose scores give a reward model's mean and standard deviation: the standard error
of the mean is then 1/60 of a deviation.
"""
EXAMINED_PAIRS = 5000
"""New pairs that the champion's reward model judges: enough for an interval of 0.013."""
GAP_SAMPLE = 16
"""Responses per update whose log-probs are recomputed for comparison."""
BUCKET_ELEMENTS = 2**22
"""Gradients are summed over processes in messages of about this size: few calls, and a copy of
16 MiB instead of all gradients.
"""
CHUNK_LOGITS = 2**22
"""Logits held at once on a CPU, whose caches they should not leave: 16 MiB in fp32."""
BYTES_PER_CHUNK_LOGIT = 1024
"""An accelerator holds a logit for each of these bytes of its memory. A logit and its gradient take
14, so a chunk takes 1.4% of the device, and products are large enough to keep it busy.
"""
