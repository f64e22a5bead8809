"""The `rlhf` command. It reads arguments, calls the packages below, and prints. No package imports it."""
