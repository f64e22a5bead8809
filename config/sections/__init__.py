"""The sections of params.yaml, a module each for what belongs together."""
