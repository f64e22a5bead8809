"""What the stages on Hugging Face Trainers (sft, reward, dpo) add to them.

Only those stages may import it.
"""
