"""The command lines of dlrm_main.py, as settings of `rayrec train`."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.runs import QUIET

import rayrec
from rayrec import cli
from rayrec.cli.parser import command_flags, parse
from rayrec.commands import COMMANDS
from rayrec.commands.dlrm import DLRMFlags, command_line, train_settings
from rayrec.commands.train import configuration
from rayrec.config import InputError
from rayrec.workloads.base import TrainConfig

ORIGINAL = """
epochs=1 batch_size=32 drop_last_training_batch=False test_batch_size=None limit_train_batches=None
limit_val_batches=None limit_test_batches=None dataset_name=criteo_1t num_embeddings=100000
num_embeddings_per_feature=None dense_arch_layer_sizes=512,256,64
over_arch_layer_sizes=512,512,256,1 embedding_dim=64 interaction_branch1_layer_sizes=2048,2048
interaction_branch2_layer_sizes=2048,2048 dcn_num_layers=3 dcn_low_rank_dim=512
undersampling_rate=None seed=None pin_memory=None mmap_mode=None in_memory_binary_criteo_path=None
synthetic_multi_hot_criteo_path=None learning_rate=15.0 eps=1e-08 shuffle_batches=None
shuffle_training_set=None validation_freq_within_epoch=None adagrad=False interaction_type=original
collect_multi_hot_freqs_stats=False multi_hot_sizes=None multi_hot_distribution_type=None
lr_warmup_steps=0 lr_decay_start=0 lr_decay_steps=0 print_lr=False allow_tf32=False
print_sharding_plan=False validation_auroc=None evaluate_on_epoch_end=False
evaluate_on_training_end=False print_progress=False change_lr=False lr_change_point=None
lr_after_change_point=None
"""
"""Flags and defaults in dlrm_main.py (June 2025), then in MLPerf's copy and in the version from
2022.
"""
SMALL = (
    "--batch_size 8 --embedding_dim 4 --dense_arch_layer_sizes 8,4 --over_arch_layer_sizes 8,1 "
    "--learning_rate 0.5"
)
BAGS = "3,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1"


def config_flags(words: str) -> DLRMFlags:
    return DLRMFlags().updated(parse(COMMANDS["dlrm"], shlex.split(words)).keywords)


def config_of(words: str, workers: int = 2) -> TrainConfig:
    """Return the configuration, which the printed command has too."""
    recipe, settings = train_settings(config_flags(words), workers=workers, use_gpu=False)
    config = configuration(recipe, settings)
    assert parse(COMMANDS["train"], shlex.split(command_line(recipe, settings))[2:]).arguments == [
        config
    ]
    return config


def test_flags_and_defaults_match_original() -> None:
    ours = {flag.name: flag.value for flag in command_flags(COMMANDS["dlrm"])}
    unset = {
        "seed": 0,
        "pin_memory": False,
        "mmap_mode": False,
        "shuffle_batches": False,
        "shuffle_training_set": False,
    }
    assert {
        name: str(unset[name] if text == "None" and name in unset else text)
        for name, text in (pair.split("=") for pair in ORIGINAL.split())
    } == {name: str(value) for name, value in ours.items()}


def test_settings_reach_recipe() -> None:
    words = (
        f"{SMALL} --num_embeddings 1000 --epochs 2 --seed 3 --interaction_type=dcn "
        "--dcn_num_layers=2 --adagrad --eps 1e-6"
    )
    words += (
        " --test_batch_size 16 --limit_train_batches 5 --limit_test_batches 2 "
        "--validation_freq_within_epoch 3 --allow_tf32"
    )
    config = config_of(
        f"{words} --lr_warmup_steps 2 --lr_decay_start 4 --lr_decay_steps 6 --pin_memory --print_lr"
    )
    workload: Any = config.workload
    assert config.train_data.path == f"random:{2 * (5 * 8 + 10 * 16 + 2 * 16)}:3"
    rows = workload.preset.split.validation, workload.preset.split.test
    assert [round(464 * fraction) for fraction in rows] == [320, 64]
    assert workload.preset.num_embeddings == (1000,) * 26
    assert (workload.model.interaction, workload.model.cross_layers, workload.model.top_mlp) == (
        "cross",
        2,
        (8, 1),
    )
    for optimizer in (workload.sparse_optimizer, workload.dense_optimizer):
        assert (optimizer.kind, optimizer.learning_rate, optimizer.eps) == ("adagrad", 0.5, 1e-6)
    schedule = workload.schedule
    assert (schedule.warmup_steps, schedule.decay_start_step, schedule.decay_steps) == (2, 4, 6)
    assert (
        config.epochs,
        config.evaluate_every,
        config.eval_batch_size,
        config.tf32,
        config.seed,
    ) == (2, 3, 16, True, 3)
    assert config_of("--validation_auroc 0.8025").early_stopping.target == 0.8025
    projected: Any = config_of(
        "--interaction_type projection --interaction_branch1_layer_sizes 128,64"
    ).workload
    assert (projected.model.projection_first, projected.dense_optimizer.kind) == ((128, 64), "sgd")
    bags: Any = config_of(f"--multi_hot_sizes={BAGS} --multi_hot_distribution_type pareto").workload
    assert (bags.preset.multi_hot.sizes[19:21], bags.preset.multi_hot.distribution) == (
        (12, 100),
        "pareto",
    )


def test_unsupported_flags_raise(tmp_path: Path) -> None:
    for words, fixes in (
        (
            "--drop_last_training_batch --undersampling_rate .5",
            ("--drop_last_training_batch: every", ". --undersampling_rate: "),
        ),
        (
            "--change_lr --lr_change_point 0.8",
            ("--change_lr: lost in 2022; use --lr_decay_start", "--lr_change_point: "),
        ),
        (
            "--in_memory_binary_criteo_path a --limit_test_batches 2 --multi_hot_sizes 1,2",
            ("--limit_test_batches: the", "adopt"),
        ),
        ("--in_memory_binary_criteo_path a --synthetic_multi_hot_criteo_path b", ("set only one",)),
        ("--num_embeddings_per_feature 1,2", ("must be 26 numbers",)),
        (
            "--dense_arch_layer_sizes 5,x",
            ("--dense_arch_layer_sizes: must be numbers of at least 1",),
        ),
        (f"--in_memory_binary_criteo_path {tmp_path}/none", (f"{tmp_path}/none: not found",)),
        (
            f"--in_memory_binary_criteo_path {tmp_path}",
            (f"`rayrec adopt {tmp_path} --num-embeddings-per-feature 100000,",),
        ),
    ):
        with pytest.raises(InputError) as raised:
            train_settings(config_flags(words), workers=1, use_gpu=False)
        assert [fix for fix in fixes if fix not in str(raised.value)] == []


def test_sharding_plan_lists_tables_and_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rayrec.commands.train.train", lambda *_, **__: None)
    for rank, is_printed in ((0, True), (1, False)):
        for name, value in {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": 1,
        }.items():
            monkeypatch.setenv(name, str(value))
        COMMANDS["dlrm"].function(print_sharding_plan=True, num_embeddings=1234)
        err = capsys.readouterr().err
        assert [f"cat_{number} " in err for number in range(26)] == [is_printed] * 26
        assert ("table_wise" in err) == ("1,234" in err) == is_printed


def test_diverging_loss_names_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = (
        "--embedding_dim 8 --dense_arch_layer_sizes 64,8 --over_arch_layer_sizes 64,1 "
        "--num_embeddings 100"
    )
    small += " --limit_train_batches 4 --limit_val_batches 1 --limit_test_batches 1"
    assert cli.run(["dlrm", *small.split()]) == 2
    err = capsys.readouterr().err
    assert "training diverges. Lower the learning rate, now 15 (--learning-rate)" in err
    assert "of 32 logits are NaN: the model diverged" in err


def test_trains_on_random_rows_and_adopted_arrays(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["dlrm", *f"{SMALL} --num_embeddings 100 --limit_train_batches 3".split()]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows_of_sets"] == {"train": 24, "validation": 80, "test": 80}
    assert "rayrec train mlperf_dlrm --train-data.path random:184 " in err
    random = np.random.default_rng(0)
    for day, rows in enumerate((64, 33)):
        np.save(f"day_{day}_dense.npy", random.random((rows, 13), np.float32))
        np.save(f"day_{day}_sparse.npy", random.integers(0, 50, (rows, 26)).astype(np.int32))
        np.save(f"day_{day}_labels.npy", random.integers(0, 2, (rows, 1)).astype(np.int32))
    rayrec.adopt(str(tmp_path), num_embeddings_per_feature=(40,) * 26, console=QUIET)
    data = ["--in_memory_binary_criteo_path", str(tmp_path)]
    monkeypatch.setattr(
        "rayrec.commands.train.train", lambda *recipe, **settings: (recipe, settings)
    )
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 4,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    call = parse(
        COMMANDS["dlrm"],
        [*data, *SMALL.split(), "--num_embeddings", "40", "--limit_train_batches", "2"],
    )
    limited = config_flags(f"{shlex.join(data)} --num_embeddings 40 --limit_val_batches 3")
    assert train_settings(limited, workers=2, use_gpu=False)[1]["eval_rows"] == 3 * 32 * 2
    recipe, settings = COMMANDS["dlrm"].function(**call.keywords, console=QUIET)
    assert recipe == ("mlperf_dlrm",)
    assert (settings["scaling.num_workers"], settings["steps"], settings["train_data.path"]) == (
        4,
        2,
        str(tmp_path),
    )
    with pytest.raises(
        InputError, match=r"tables have 40,40,.* rows\. Pass them as --num_embeddings_per_feature"
    ):
        train_settings(config_flags(shlex.join(data)), workers=1, use_gpu=False)
