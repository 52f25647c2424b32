"""GPT-2 recipes: a model for a laptop, and the model with 124 million parameters."""

from rayrec.optim.config import DenseOptimizerConfig, LearningRateSchedule
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.language import GPT2Config, LanguageWorkload
from rayrec.workloads.run_config import DataConfig, ScalingConfig

_ADAMW = DenseOptimizerConfig(
    kind="adamw", weight_decay=0.1, decay_matrices_only=True, max_gradient_norm=1.0
)


def gpt2_tiny(path: str | None = None) -> TrainConfig:
    """Train a character-level GPT-2 with 0.8 million parameters on a megabyte of text, in blocks of
    128: minutes on a laptop.
    """
    return TrainConfig(
        recipe="gpt2_tiny",
        workload=LanguageWorkload(
            model=GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=128, dropout=0.0),
            optimizer=_ADAMW.replace(learning_rate=0.003, betas=(0.9, 0.99)),
            schedule=LearningRateSchedule(
                warmup_fraction=0.05, decay_fraction=0.95, decay="cosine", final_fraction=0.1
            ),
        ),
        train_data=DataConfig(path=path, shuffle="full"),
        epochs=8,
        batch_size=8,
        eval_batch_size=128,
        precision="bf16",
        scaling=ScalingConfig(num_workers=2),
    )


def gpt2(path: str | None = None) -> TrainConfig:
    """Train GPT-2 with 124 million parameters in blocks of 1024, like nanoGPT: 480 blocks (491,520
    tokens) per step.
    """
    return TrainConfig(
        recipe="gpt2",
        workload=LanguageWorkload(
            model=GPT2Config(n_layer=12, n_head=12, n_embd=768, n_positions=1024, dropout=0.0),
            accumulate=5,
            optimizer=_ADAMW.replace(learning_rate=6e-4, betas=(0.9, 0.95)),
            schedule=LearningRateSchedule(
                warmup_steps=2000, decay_fraction=1.0, decay="cosine", final_fraction=0.1
            ),
            max_new_tokens=200,
        ),
        train_data=DataConfig(path=path, shuffle="window"),
        steps=600_000,
        batch_size=60,
        eval_batch_size=16,
        evaluate_every=2000,
        precision="bf16",
        scaling=ScalingConfig(num_workers=8, use_gpu=True),
    )


RECIPES = (gpt2_tiny, gpt2)
