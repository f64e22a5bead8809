"""Measurements behind the figures in README and docs; run by people, never by the tests."""
