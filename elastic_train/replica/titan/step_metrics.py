"""torchtitan's metrics under torchtitan's names, and the same figures as records of ``metrics.jsonl``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan.components.metrics import BaseLogger, MetricsProcessor

StepSink = Callable[[dict[str, Any]], None]


class StepMetrics(MetricsProcessor):
    """Logs to console, TensorBoard and W&B as torchtitan does, below a folder of the replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        replica: int = 0
        """Slot, for ``tb/<time>/replica_<slot>``."""

    sink: StepSink | None = None
    """Where the figures of a logged step go besides; set by the trainer on the rank that logs."""

    def _build_metric_logger(self, *, config: Config, **settings: Any) -> BaseLogger:
        settings |= {"ft_enable": True, "ft_replica_id": config.replica}
        return super()._build_metric_logger(config=config, **settings)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        elapsed = time.perf_counter() - self.time_last_log
        tps = self.ntokens_since_last_log / (elapsed * self.parallel_dims.non_data_parallel_size)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        if self.sink is not None:
            rates = [value for name, value in (extra_metrics or {}).items() if name.startswith("lr/")]
            self.sink(
                {
                    "step": step,
                    "loss": global_avg_loss,
                    "grad_norm": grad_norm,
                    "lr": rates[0] if rates else None,
                    "tps": round(tps, 2),
                }
            )
