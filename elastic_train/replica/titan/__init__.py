"""torchtitan: the only place that knows its modules, its config and what its version needs mended."""
