"""Every setting of a run: its keys, how they are read and checked, and the command line."""

from bacr_jax.config.method_settings import (
    AdvantageConfig as AdvantageConfig,
    AnytimeConfig as AnytimeConfig,
    BudgetConfig as BudgetConfig,
    ConditioningConfig as ConditioningConfig,
    CurriculumConfig as CurriculumConfig,
    CutsConfig as CutsConfig,
    DapoConfig as DapoConfig,
    ElasticConfig as ElasticConfig,
    HapoConfig as HapoConfig,
    L1Config as L1Config,
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
