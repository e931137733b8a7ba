"""Readers of the log: what a person sees of a run, while it goes on and afterwards."""
