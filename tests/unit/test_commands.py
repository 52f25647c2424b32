"""Commands: help, errors, results, and imported modules."""

import dataclasses
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from builders.faults import raising, rejects
from builders.runs import QUIET

from rayrec import cli, recipes, train
from rayrec.cli import print_json, show
from rayrec.cli.flags import recipe_flags
from rayrec.cli.parser import command_flags, parse
from rayrec.commands import COMMANDS
from rayrec.commands.declaration import Shown
from rayrec.commands.settings import updated
from rayrec.commands.train import configuration
from rayrec.config import Config
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.schema import PlaceholderSchema, Schema, load_schema
from rayrec.training.result import summary_rows
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.workload import ClickWorkload

Capture = pytest.CaptureFixture[str]
RAY = {"ray", "ray.data", "ray.train"}
TORCHREC = {"torchrec", "fbgemm_gpu", "tensordict"}
HEAVY = {*RAY, *TORCHREC, "torch", "torch._dynamo", "sympy", "pandas"}
UNTIL_TRAINED = [
    ("recipes", HEAVY),
    ("config criteo_demo", HEAVY),
    ("plan criteo_demo --help", HEAVY),
    ("doctor --help", HEAVY),
    ("generate log --rows 2000", HEAVY),
    ("vocabulary log/train.txt --out vocabulary", HEAVY),
    ("validate log/train.txt", HEAVY),
    ("preprocess log/train.txt --out preprocessed --format parquet", HEAVY),
    (
        "train criteo_demo --name run --data log --batch-size 512 --steps 2 --workers 1 "
        "--scaling.threads-per-worker 1",
        RAY,
    ),
]
"""Commands, and modules that they must not import, which take seconds. One process runs all, in the
order of their imports.
"""
TRAINED = [
    ("report runs/run", HEAVY),
    ("evaluate runs/run log/train.txt", HEAVY - {"torch"}),
    ("predict runs/run log/train.txt --out predicted", HEAVY - {"torch"}),
]
"""The same after training, in another process."""


@pytest.mark.extended
def test_commands_load_no_unneeded_heavy_modules(tmp_path: Path) -> None:
    assert (loaded_needlessly(UNTIL_TRAINED, tmp_path), loaded_needlessly(TRAINED, tmp_path)) == (
        {},
        {},
    )


def loaded_needlessly(commands: list[tuple[str, set[str]]], folder: Path) -> dict[str, list[str]]:
    """Run the commands in one process and return the unneeded modules imported after each."""
    code = (
        "import contextlib, json, os, sys\n"
        "from rayrec import cli\n"
        "found = {}\n"
        "for command, unneeded in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):\n"
        "        assert cli.run(command.split()) == 0, command\n"
        "    found[command] = [module for module in unneeded if module in sys.modules]\n"
        "print(json.dumps(found), flush=True)\n"
        "os._exit(0)\n"  # Interpreter shutdown takes seconds.
    )
    asked = [
        sys.executable,
        "-c",
        code,
        json.dumps([[command, sorted(unneeded)] for command, unneeded in commands]),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        asked, capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment
    )
    assert ran.returncode == 0, ran.stderr
    return {command: found for command, found in json.loads(ran.stdout).items() if found}


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        pytest.param(
            FileNotFoundError(2, "No such file or directory", "log.txt"),
            2,
            "log.txt: No such file or directory",
            id="FileNotFoundError-2-No-such",
        ),
        pytest.param(
            OSError("s3://b/run: the store was out\nfor 600 s"),
            1,
            "s3://b/run: the store was out for 600 s",
            id="OSError-s3-b-run-the-store-was",
        ),
        pytest.param(
            OSError(28, "No space left on device"),
            1,
            "[Errno 28] No space left on device",
            id="OSError-28-No-space-left-on",
        ),
        pytest.param(PermissionError(), 1, "PermissionError", id="PermissionError"),
    ],
)
def test_storage_errors_print_one_line(
    error: Any, status: int, line: str, monkeypatch: Any, capsys: Capture
) -> None:
    monkeypatch.setattr("rayrec.training.trainer.train", raising(error))
    assert cli.run(["train", "criteo_demo"]) == status
    assert capsys.readouterr().err == f"rayrec train: {line}\n"


def test_results_exclude_output_of_native_code_and_children() -> None:
    script = (
        "import os, subprocess, sys\n"
        "from rayrec import cli\n"
        "def run(arguments):\n"
        "    os.write(1, b'a warning of Ray\\n')\n"
        "    subprocess.run(['echo', 'a child'], check=True)\n"
        "    print('{\"auroc\": 0.5}')\n"
        "    return 3\n"
        "cli.run = run\n"
        "cli.main(['evaluate'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, '{"auroc": 0.5}\n')
    assert done.stderr == "a warning of Ray\na child\n"


def test_closed_output_ends_without_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "rayrec", "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_results_exclude_library_output(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def score(*_: object, **__: object) -> dict[str, float]:
        print("a warning of Ray")
        return {"auroc": 0.5}

    monkeypatch.setattr(
        "rayrec.commands.inference._recipe_config", lambda *_: recipes.criteo_demo()
    )
    monkeypatch.setattr("rayrec.inference.evaluate.evaluate", score)
    monkeypatch.setattr("rayrec.inference.predict.predict_to", score)
    assert cli.run([verb, "run", "log", *(["--out", "scores"] if verb == "predict" else [])]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"auroc": 0.5}
    assert "a warning of Ray" in err


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    status = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_invalid_flag_prints_one_line(capsys: Capture) -> None:
    names = f"Use one of {', '.join(recipes.ALL)}, or FILE.py:FUNCTION."
    for words, line in (
        ("--step 5", "unknown flag --step, did you mean --steps?"),
        ("--batchsize=5", "unknown flag --batchsize, did you mean --batch-size?"),
        (
            "--shuffl none",
            "unknown flag --shuffl, did you mean --train-data.shuffle or --eval-data.shuffle?",
        ),
        (
            "--pin_memory",
            "unknown flag --pin_memory. `rayrec config criteo_demo --help-all` shows all flags.",
        ),
        (
            "--qqqqqqq",
            "unknown flag --qqqqqqq. `rayrec config criteo_demo --help-all` shows all flags.",
        ),
        ("more", "unexpected argument 'more'. See `rayrec config criteo_demo --help`."),
        (
            "--steps few",
            "--steps: must be a valid integer, unable to parse string as an integer, got 'few'",
        ),
        (
            "--steps 2.5",
            "--steps: must be a valid integer, unable to parse string as an integer, got '2.5'",
        ),
        ("--precision fp8", "--precision: must be 'fp32' or 'bf16', got 'fp8'"),
        (
            "--scaling.num-workers 1 2 3",
            "--scaling.num-workers: must be a valid integer or Tuple should have at most 2 items "
            "after validation, not 3, got '1 2 3'",
        ),
        ("--config", "--config: requires a value"),
        ("--config=", "--config: requires a value"),
        ("--schema --steps 5", "--schema: requires a value"),
        ("--config=a --config b", "--config: must be set once, got 2 values"),
        ("predict run --out x", "missing PATH. See `rayrec predict --help`."),
        ("predict run log --uot x", "unknown flag --uot, did you mean --out?"),
        (
            "predict run log --out x --recipe criteo_dem",
            f"no recipe 'criteo_dem'; did you mean 'criteo_demo'? {names}",
        ),
    ):
        name, *others = (
            words.split()
            if words.split()[0] in COMMANDS
            else ["config", "criteo_demo", *words.split()]
        )
        assert run(capsys, name, *others) == (2, "", f"rayrec {name}: {line}\n")


@pytest.mark.parametrize("joined", [True, False])
def test_file_flags_accept_space_or_equals_sign(
    capsys: Capture, tmp_path: Path, joined: bool
) -> None:
    config = tmp_path / "config.yaml"
    schema = tmp_path / "schema.yaml"
    config.write_text("\ufeffrecipe: clicks\nsteps: 7\n", encoding="utf-8")
    schema.write_text("{label: y, dense: [a], sparse: [b]}")
    given = (
        [f"--config={config}", f"--schema={schema}"]
        if joined
        else ["--config", str(config), "--schema", str(schema)]
    )
    status, out, err = run(capsys, "config", *given)
    assert (status, err) == (0, "")
    resolved = yaml.safe_load(out)
    assert (resolved["steps"], resolved["workload"]["schema"]["dense"]) == (7, ["a"])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(
            "recipe: clicks\nname: \u00e9\n".encode("latin-1"),
            "must be UTF-8 text. Save it with that encoding",
            id="recipe-clicks-nname-n-.encode",
        ),
        pytest.param(b"recipe: [", "not YAML", id="recipe"),
        pytest.param(
            b"recipe: clicks\nsteps: 2001-99-99\n",
            "not YAML (month must be in 1..12)",
            id="recipe-clicks-steps-2001-99-99",
        ),
        pytest.param(b"steps: 3\n", "must name a recipe", id="steps-3"),
        pytest.param(
            b"recipe: click\n", "no recipe 'click'; did you mean 'clicks'?", id="recipe-click"
        ),
        pytest.param(
            b"recipe: clicks\nstep: 3\n",
            "step: TrainConfig has no such field; did you mean 'steps'?",
            id="recipe-clicks-step-3",
        ),
        pytest.param(
            b"recipe: clicks\nname: ..\n",
            "name: must have 1 to 128 letters",
            id="recipe-clicks-name",
        ),
        pytest.param(
            b"recipe: clicks\n3: 4\n", "field names must be strings, got 3", id="recipe-clicks-3-4"
        ),
        pytest.param(
            b"recipe: !!python/object/apply:os.getcwd []\n",
            "not YAML",
            id="recipe-python-object-apply",
        ),
    ],
)
def test_invalid_config_file_prints_one_line(
    content: Any, line: str, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    status, out, err = run(capsys, "config", f"--config={file}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rayrec config: {file}: {line}")


def test_run_name_results_and_summary_rows_are_well_formed(capsys: Capture) -> None:
    for name in ("..", ".", ".hidden", "-x", "a/b", "", "a b", "x" * 129, "a\n"):
        rejects("name: must have 1 to 128 letters", recipes.criteo_demo().replace, name=name)
    for name in ("a", "_b", "7", "a..b", "x" * 128, "größe_1.0-rc"):
        assert recipes.criteo_demo().replace(name=name).name == name
    print_json({"auroc": float("nan"), "logloss": 0.5}, sys.stdout)
    assert capsys.readouterr().out == '{\n  "auroc": null,\n  "logloss": 0.5\n}\n'
    summary = {
        "metrics": {"auroc": 0.7},
        "rows_per_s": 1.0,
        "blocked_fraction": 0.0,
        "rows": 1,
        "steps": 1,
        "wall_s": 1.0,
        "checkpoint": "runs/a/checkpoints/step_00000001",
    }
    rows = dict(summary_rows(summary, folder="runs/a"))
    assert rows["report"] == "runs/a/report.html"
    assert rows["next"].startswith("rayrec serve runs/a ")
    assert "next" not in dict(
        summary_rows({**summary, "metrics": {"accuracy": 0.9}}, folder="runs/a")
    )


@pytest.mark.parametrize(
    ("command", "words", "notice"),
    [
        pytest.param(
            "vocabulary",
            "log --out v --profile nvt",
            "--profile is now --preset; the old name will be removed",
            id="vocabulary",
        ),
        pytest.param(
            "vocabulary",
            "log --out v --profile=nvt",
            "--profile is now --preset",
            id="vocabulary-log-out-v-profile-nvt",
        ),
        pytest.param(
            "config",
            "criteo_demo --workload.profile.min-count 3",
            "--workload.profile.min-count is now",
            id="config",
        ),
        pytest.param(
            "config",
            "criteo_demo --profile.steps 10:20",
            "",
            id="config-criteo_demo-profile.steps-10-20",
        ),
    ],
)
def test_old_flag_prints_notice(command: str, words: str, notice: str, capsys: Capture) -> None:
    parse(COMMANDS[command], words.split())
    printed = capsys.readouterr()
    assert printed.err.startswith(notice)
    assert (printed.err.count("\n"), printed.out) == (int(bool(notice)), "")


def test_old_flag_sets_field_and_model_flag_selects_model() -> None:
    (config,) = parse(
        COMMANDS["train"], ["criteo_kaggle", "--workload.profile.min-count", "7"]
    ).arguments
    assert isinstance(config.workload, ClickWorkload)
    assert config.workload.preset.min_count == 7
    flags = "criteo_kaggle --model finalnet --workload.model.first-tower 8"
    (config,) = parse(COMMANDS["train"], flags.split()).arguments
    assert isinstance(config.workload, ClickWorkload)
    assert config.workload.model == FinalNetConfig(embedding_dim=16, first_tower=(8,))
    for words, match in (
        (
            "criteo_kaggle --model finalnett",
            r"^model: unknown model finalnett, did you mean 'finalnet'\?$",
        ),
        (
            "criteo_kaggle --model=tree",
            r"^model: unknown model tree, use one of .*dlrm, .*finalnet.*, or .* custom model\.$",
        ),
        ("mnist_resnet18 --model dlrm", r"^model: must be settings of ResNetConfig, got 'dlrm'"),
        (flags.replace("tower", "towe"), r"did you mean --workload\.model\.first-tower"),
    ):
        rejects(match, parse, COMMANDS["train"], words.split())


@pytest.mark.usefixtures("own_cache")
def test_quiet_prints_only_results(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        "generate -q log --rows 3000",
        "vocabulary log/train.txt -q --out vocabulary",
        "preprocess log/train.txt --out ready --format parquet -q",
        "split log/train.txt --out parts --by rows -q",
        "validate -q log/train.txt",
        "train criteo_demo --train-data.path log/train.txt --name run --steps 1 --batch-size 256 "
        "--scaling.num-workers 1 -q",
        "evaluate runs/run -q",
        "predict runs/run log/train.txt --out scores -q",
        "compare runs/run runs/run --json -q --resamples 100",
    ):
        status, out, err = run(capsys, *words.split())
        assert (status, err) == (0, ""), words
        assert json.loads(out)


@pytest.mark.usefixtures("own_cache")
def test_failed_gate_prints_report_and_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "generate", str(tmp_path), "--rows", "300")
    status, out, err = run(
        capsys, "validate", str(tmp_path / "train.txt"), "--gates.min-rows", "1000000"
    )
    assert (status, len(json.loads(out)["failures"])) == (2, 1)
    assert re.match(r"rayrec validate: .*min.rows", err.splitlines()[-1])


def test_switches_stop_at_job_and_overview_lists_commands(capsys: Capture) -> None:
    words, switches = cli.take_switches(["--env", "A", "-q", "--", "train", "clicks", "-v"])
    assert (words, switches) == (["--env", "A", "--", "train", "clicks", "-v"], {"-q"})
    config, job = parse(COMMANDS["supervise"], words).arguments
    assert (config, job) == (recipes.clicks(), ["clicks", "-v"])
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert [name for name in COMMANDS if not re.search(rf"^.{{8}}{name} ", out, re.MULTILINE)] == []
    assert max(map(len, out.splitlines())) <= 130


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_all_flags(name: str, capsys: Capture) -> None:
    if not COMMANDS[name].raw:
        shown = run(capsys, name, "--help-all")[1]
        assert shown.startswith(f"usage: rayrec {name}")
        assert [
            flag.shown for flag in command_flags(COMMANDS[name]) if flag.shown not in shown
        ] == []


@pytest.mark.parametrize("recipe", ["criteo_demo", "gpt2_tiny", "mnist_resnet18", "clicks_din"])
def test_recipe_help_is_short_and_help_all_complete(recipe: str, capsys: Capture) -> None:
    lines = run(capsys, "train", recipe, "--help")[1].splitlines()
    assert len(lines) <= 45
    assert any(line.startswith("  --data PATH ") for line in lines[:12])
    shown = run(capsys, "train", recipe, "--help-all")[1]
    settings = recipe_flags(recipes.ALL[recipe]())
    assert [flag.name for flag in settings if flag.owner and f"--{flag.name}" not in shown] == []
    words = " ".join(shown.split())
    assert [
        flag.name
        for flag in settings
        if flag.owner and not (flag.text and " ".join(flag.text.split())[:20] in words)
    ] == []


@pytest.mark.parametrize(
    ("content", "cause"),
    [("label: [", "not YAML"), ("label: 2001-99-99", "not YAML (month must be in 1..12)")],
)
def test_invalid_schema_yaml_is_rejected(
    content: str, cause: str, capsys: Capture, tmp_path: Path
) -> None:
    schema = tmp_path / "bad.yaml"
    schema.write_text(content)
    status, _, line = run(
        capsys, "train", "clicks", "--data", str(tmp_path), "--schema", str(schema)
    )
    assert (status, "\n" in line.strip()) == (2, False)
    assert f"{schema}: {cause}" in line


@pytest.mark.parametrize("recipe", ["clicks", "clicks_din", "next_item", "two_tower"])
def test_recipe_with_placeholder_needs_schema(recipe: str, capsys: Capture, tmp_path: Path) -> None:
    """Before anything starts."""
    placeholder = recipes.ALL[recipe]().workload.schema  # type: ignore[attr-defined]
    log = tmp_path / "log.csv"
    log.write_text(f"{','.join(placeholder.columns)}\n0,1,2,3\n")
    line = (
        "schema: the recipe needs the columns of your log, got none. Pass --schema FILE with the "
        "like of {label: "
    )
    runs = str(tmp_path / "runs")
    for name, *words in (
        ["train", recipe, "--data", str(log), "--storage-path", runs],
        ["tune", recipe, "--data", str(log), "--storage-path", runs, "--search", "search.yaml"],
        ["plan", recipe, "--data", str(log)],
        ["vocabulary", str(log), "--out", str(tmp_path / "out"), "--recipe", recipe],
    ):
        if name == "tune" and not recipe.startswith("clicks"):
            continue  # Which searches click models only
        (tmp_path / "search.yaml").write_text("seed: {grid: [1]}")
        words = [str(tmp_path / word) if word == "search.yaml" else word for word in words]
        status, out, err = run(capsys, name, *words)
        assert (status, out, err.count("\n")) == (2, "", 1), name
        assert err.startswith(f"rayrec {name}: {line}")
    assert not Path(runs).exists()


@pytest.mark.parametrize("recipe", ["clicks", "clicks_din", "next_item", "two_tower"])
def test_example_schema_replaces_placeholder(recipe: str, capsys: Capture, tmp_path: Path) -> None:
    placeholder = recipes.ALL[recipe]().workload.schema  # type: ignore[attr-defined]
    file = tmp_path / "schema.yaml"
    file.write_text(placeholder.example)
    schema = load_schema(placeholder.example, "example")
    assert [getattr(schema, field.name) for field in dataclasses.fields(Schema)] == [
        getattr(placeholder, field.name) for field in dataclasses.fields(Schema)
    ]
    (config,) = parse(
        COMMANDS["train"], [recipe, "--schema", str(file), "--data", str(tmp_path)]
    ).arguments
    assert config.workload.schema == schema
    config.workload.check(config)
    shown = run(capsys, "train", recipe, "--help")[1]
    assert shown.startswith(f"usage: rayrec train {recipe} --schema FILE --data PATH [flags]\n")
    assert f"  rayrec train {recipe} --schema schema.yaml --data log/train.txt\n" in shown
    assert re.search(r"--schema FILE +YAML file with the columns of the log \[required\]", shown)


def test_placeholder_with_changes_is_schema() -> None:
    config = recipes.clicks("log.csv")
    schema = config.replace(steps=3).workload.schema  # type: ignore[attr-defined]
    assert isinstance(schema, PlaceholderSchema)
    changed = config.replace(workload={"schema": {"sparse": ("a",)}})
    assert type(changed.workload.schema) is Schema  # type: ignore[attr-defined]
    changed.workload.check(changed)


def test_short_names_reach_their_settings() -> None:
    words = (
        "criteo_demo --data a --eval-data b --lr 0.5 --table-lr 0.25 --workers 2 3 --model finalnet"
    )
    (config,) = parse(COMMANDS["train"], words.split()).arguments
    assert (config.train_data.path, config.eval_data.path, config.scaling.num_workers) == (
        "a",
        "b",
        (2, 3),
    )
    (other,) = parse(
        COMMANDS["train"], ["criteo_demo", "--table-lr", "0.25", "--learning-rate", "0.5"]
    ).arguments
    for workload in (config.workload, other.workload):
        assert (
            workload.dense_optimizer.learning_rate,
            workload.sparse_optimizer.learning_rate,
        ) == (0.5, 0.25)
    (config,) = parse(COMMANDS["train"], ["mnist_resnet18", "--lr", "0.5", "--gpus", "4"]).arguments
    assert config.workload.optimizer.learning_rate == 0.5
    assert (config.scaling.num_workers, config.scaling.use_gpu) == (4, True)
    assert configuration("mnist_resnet18", {"lr": 0.5, "gpus": 4}) == config


def test_recipe_accepts_file_or_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    config = recipes.criteo_demo().replace(steps=7, name="other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for file in ("my.yaml", "runs/demo/config.yaml"):
        (tmp_path / file).write_text(config.to_yaml())
    assert parse(COMMANDS["train"], ["my.yaml"]).arguments == [config]
    resumed = config.replace(name="demo", storage_path=str(tmp_path / "runs"))
    assert parse(COMMANDS["train"], ["runs/demo/", "--steps", "9"]).arguments == [
        resumed.replace(steps=9)
    ]
    assert run(capsys, "resume", "none")[2].startswith(
        "rayrec resume: none: not a recipe, and no run (no config.yaml)"
    )
    (tmp_path / "log.txt").write_text("\t" * 39 + "\n")
    (tmp_path / "clicks.txt").write_text("click,user\n1,a\n")
    rejects(
        "^train_data.path: must be a training log, got None. Pass --data PATH", train, "criteo_demo"
    )
    rejects(
        "^log.txt: not a recipe.* rayrec train criteo_demo --data log.txt",
        parse,
        COMMANDS["train"],
        ["log.txt"],
    )
    for data in ("clicks.txt", "runs"):
        rejects(
            f"^{data}: not a recipe.* rayrec schema {data} --out schema.yaml",
            parse,
            COMMANDS["train"],
            [data],
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "as_json", "quiet", "printed", "noted"),
    [
        pytest.param(Terminal(), False, False, "a table\n", "", id="Terminal"),
        pytest.param(
            Terminal(), True, False, '{\n  "auroc": 0.5\n}\n', "a table\n", id="Terminal-True"
        ),
        pytest.param(
            io.StringIO(), False, False, '{\n  "auroc": 0.5\n}\n', "a table\n", id="io.StringIO"
        ),
        pytest.param(
            io.StringIO(), False, True, '{\n  "auroc": 0.5\n}\n', "", id="io.StringIO-False"
        ),
    ],
)
def test_result_prints_table_or_json(
    out: Any, as_json: bool, quiet: bool, printed: str, noted: str, capsys: Capture
) -> None:
    assert show(Shown({"auroc": 0.5}, "a table"), as_json=as_json, quiet=quiet, out=out) == 0
    assert (out.getvalue(), capsys.readouterr().err) == (printed, noted)


# -- Command lines of the documentation, deploy/ and tests
LINES = json.loads((Path(__file__).parents[1] / "golden" / "command_lines.json").read_text())
SCHEMA = "{label: y, dense: [a], sparse: [b]}"
CONFIG = "recipe: criteo_demo\nsteps: 7\n"


def changes(config: Config, default: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from the default, with their names."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        before = getattr(default, field.name, None)
        # A placeholder is a Schema
        if isinstance(value, Config) and isinstance(before, type(value)):
            yield from changes(value, before, f"{prefix}{field.name}.")
        elif value != before:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: Any) -> Any:
    if isinstance(value, Config):
        return plain({"class": type(value).__name__, **value.to_dict()})
    if isinstance(value, dict):
        return {
            name: each.rpartition(".")[2] if name == "class" else plain(each)
            for name, each in value.items()
        }
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def call_of(line: str) -> dict[str, Any]:
    """Return the call of a command line: command name and non-default values."""
    name, *words = shlex.split(line)
    words, switches = cli.take_switches(words)
    command = COMMANDS[name]
    call = parse(command, words)
    signature = inspect.signature(command.function)
    given = signature.bind(*call.arguments, **call.keywords).arguments
    given.update(
        given.pop(
            next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), ""), {}
        )
    )
    made = {
        "command": name,
        **({"quiet": True} if "-q" in switches else {}),
        **({"verbose": True} if "-v" in switches else {}),
    }
    # Passed as keyword arguments, often of several configurations.
    for prefix, cls in command.settings():
        if prefix not in signature.parameters:
            fields = {field.name for field in dataclasses.fields(cls)} - set(signature.parameters)
            options = {field: given.pop(field) for field in fields & given.keys()}
            made.update(changes(settings(cls, options, given), settings(cls, {}, given)))
    for parameter, value in given.items():
        if isinstance(value, TrainConfig):
            made["recipe"] = value.recipe
            made.update(changes(value, recipes.ALL.get(value.recipe, recipes.ALL["clicks"])()))
        elif isinstance(value, Config):
            made.update(
                changes(value, type(value)(), f"{parameter}." if parameter == "gates" else "")
            )
        elif value != signature.parameters[parameter].default and value is not None:
            made[parameter] = plain(value)
    return made


def settings(cls: type[Config], options: dict[str, Any], given: dict[str, Any]) -> Config:
    needed = {
        field.name: given[field.name]
        for field in dataclasses.fields(cls)
        if field.default is field.default_factory
    }
    return updated(cls(**needed), options)


def test_command_lines_match_golden_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(place: str) -> str:
        return SCHEMA if any(word in place for word in ("schema", "labels", "columns")) else CONFIG

    monkeypatch.setattr("rayrec.storage.read_text", text)
    monkeypatch.setattr(
        "rayrec.recipes.function_in_file", lambda name, returns: recipes.ALL["clicks"]
    )
    failed = {
        line: (made, expected) for line, expected in LINES if (made := call_of(line)) != expected
    }
    assert not failed


FRAME = pd.DataFrame({"label": [0, 1], "user": [1, 2]})
FRAME_CALLS: dict[str, dict[str, Any]] = {
    "validate": {},
    "vocabulary": {"out": "none"},
    "split": {"out": "none", "by": "rows"},
    "preprocess": {"out": "none", "format": "npy"},
    "adopt": {},
}


@pytest.mark.parametrize("name", FRAME_CALLS)
def test_data_commands_reject_frames(name: str) -> None:
    rejects(
        "path: must be a path, got DataFrame. Write its rows to a file",
        COMMANDS[name].function,
        FRAME,
        **FRAME_CALLS[name],
    )
    rejects(
        "path: must be a path, got int. Pass text", COMMANDS[name].function, 3, **FRAME_CALLS[name]
    )


def test_data_commands_accept_path_objects(click_log: Path) -> None:
    validate = COMMANDS["validate"].function
    reports = [
        validate(path, console=QUIET).to_dict()
        for path in (click_log / "train.txt", str(click_log / "train.txt"))
    ]
    assert reports[0] == reports[1]
