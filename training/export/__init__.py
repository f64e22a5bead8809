"""Exports a trained model: merged safetensors with a model card, and GGUF files for llama.cpp."""
