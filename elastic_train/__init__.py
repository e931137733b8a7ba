"""Trains one LLM on many machines and does not stop when some of them die."""

__version__ = "0.1.0"
