"""Runs a study: each variant is an ordinary run, and DVC knows which stages they share."""
