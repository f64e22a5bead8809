"""Models, tokenizer, adapters, and passes over unpadded sequences.

Every package of training may import it; it knows no stage.
"""
