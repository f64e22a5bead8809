"""Models, tokenizer, adapters, and passes over unpadded sequences.

Every room of training may import it; it knows no stage.
"""
