"""A trained model in the forms that others load: merged safetensors with a model card, and GGUF
files for llama.cpp.
"""
