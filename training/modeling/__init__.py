"""Models, tokenizer, adapters, and what is computed from them without padding.

Everything below stages may import it; it knows of no stage.
"""
