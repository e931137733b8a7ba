"""What a run is told: one frozen config, read from TOML, flags and torchft's environment, checked before
anything starts.

Nothing here imports torch, so that a wrong config is answered at once.
"""

from elastic_train.config.digest import digest
from elastic_train.config.errors import ConfigError, EnvironmentProblem
from elastic_train.config.faults import FaultSpec
from elastic_train.config.load import Loaded, load_config
from elastic_train.config.schema import (
    DilocoConfig,
    FaultsConfig,
    LighthouseConfig,
    OrchestratorConfig,
    PeerCkptConfig,
    RecoveryConfig,
    RunConfig,
    SchedulerConfig,
)
from elastic_train.config.titan_schema import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    DataLoaderConfig,
    DebugConfig,
    ExperimentalConfig,
    FaultToleranceConfig,
    JobConfig,
    LRSchedulerConfig,
    MemoryEstimationConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    ProfilingConfig,
    QuantizeConfig,
    TrainingConfig,
    ValidationConfig,
)
from elastic_train.config.toml_text import to_toml

__all__ = [
    "ActivationCheckpointConfig",
    "CheckpointConfig",
    "CommConfig",
    "CompileConfig",
    "ConfigError",
    "DataLoaderConfig",
    "DebugConfig",
    "DilocoConfig",
    "EnvironmentProblem",
    "ExperimentalConfig",
    "FaultSpec",
    "FaultToleranceConfig",
    "FaultsConfig",
    "JobConfig",
    "LRSchedulerConfig",
    "LighthouseConfig",
    "Loaded",
    "MemoryEstimationConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OrchestratorConfig",
    "ParallelismConfig",
    "PeerCkptConfig",
    "ProfilingConfig",
    "QuantizeConfig",
    "RecoveryConfig",
    "RunConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "ValidationConfig",
    "digest",
    "load_config",
    "to_toml",
]
