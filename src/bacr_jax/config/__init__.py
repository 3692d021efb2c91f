"""Configuration of a run: the config dataclasses, YAML parsing, validation and shared CLI options.

This module re-exports the config dataclasses. `bacr_jax.config.io` loads a config from YAML files
and command-line overrides.
"""

from bacr_jax.config.method_settings import (
    AdvantageConfig as AdvantageConfig,
    AnytimeConfig as AnytimeConfig,
    BudgetConfig as BudgetConfig,
    ConditioningConfig as ConditioningConfig,
    CurriculumConfig as CurriculumConfig,
    CutsConfig as CutsConfig,
    DapoConfig as DapoConfig,
    DistillConfig as DistillConfig,
    ElasticConfig as ElasticConfig,
    HapoConfig as HapoConfig,
    L1Config as L1Config,
    LengthConfig as LengthConfig,
    LossConfig as LossConfig,
    RewardConfig as RewardConfig,
    SelfBudgeterConfig as SelfBudgeterConfig,
    ValueConfig as ValueConfig,
)
from bacr_jax.config.schema import (
    AdapterConfig as AdapterConfig,
    CheckpointConfig as CheckpointConfig,
    Config as Config,
    DataConfig as DataConfig,
    EvalConfig as EvalConfig,
    ExportConfig as ExportConfig,
    GradingConfig as GradingConfig,
    LedgerConfig as LedgerConfig,
    MeshConfig as MeshConfig,
    ModelConfig as ModelConfig,
    OptimizerConfig as OptimizerConfig,
    OutputConfig as OutputConfig,
    RolloutConfig as RolloutConfig,
    TrainConfig as TrainConfig,
    WarmupConfig as WarmupConfig,
)
