"""Every verb has its command, and loads what it needs alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayrec import cli, recipes
from rayrec.commands import MODULES, command
from rayrec.commands.arguments import parse_config, print_json, with_new_name
from rayrec.commands.training import _own_flags
from rayrec.config import InputError
from rayrec.models.ranking.finalnet import FinalNetConfig
from rayrec.verbs import VERBS
from rayrec.workloads.recsys.workload import ClickWorkload


def test_every_verb_has_one_command() -> None:
    verbs = [verb for verbs in MODULES.values() for verb in verbs]
    assert sorted(verbs) == sorted(verb for verb in VERBS if verb != "doctor")  # which must run where imports fail
    for verb in verbs:
        assert callable(command(verb))


@pytest.mark.parametrize(("verb", "unneeded"), [("top", "rayrec.prepare"), ("validate", "rayrec.serve.app")])
def test_a_verb_loads_its_own_module_alone(verb: str, unneeded: str) -> None:
    code = f"import sys; from rayrec.commands import command; command({verb!r}); print({unneeded!r} in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.strip() == "False"


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
        "train criteo_demo --name run --train-data.path log/train.txt --batch-size 512 --steps 2 --scaling.num-workers 1 "
        "--scaling.threads-per-worker 1",
        RAY,
    ),
]
"""Commands, and the modules that they must not load: each takes up to some seconds of every start. In the order of what they
load, since one process runs them all."""
TRAINED = [
    ("report runs/run", HEAVY),
    ("evaluate runs/run log/train.txt", HEAVY - {"torch"}),
    ("predict runs/run log/train.txt --out predicted", HEAVY - {"torch"}),
]
"""The same after a training, in another process."""


def test_commands_load_no_heavy_module_that_they_do_without(tmp_path: Path) -> None:
    assert loaded_needlessly(UNTIL_TRAINED, tmp_path) == {}
    assert loaded_needlessly(TRAINED, tmp_path) == {}


def loaded_needlessly(commands: list[tuple[str, set[str]]], folder: Path) -> dict[str, list[str]]:
    """Runs the commands in one process, in order. The modules that each must not load, and that were loaded at its end."""
    code = (
        "import contextlib, json, os, sys\n"
        "from rayrec import cli\n"
        "found = {}\n"
        "for command, unneeded in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):\n"
        "        assert cli.run(command.split()) == 0, command\n"
        "    found[command] = [module for module in unneeded if module in sys.modules]\n"
        "print(json.dumps(found), flush=True)\n"
        "os._exit(0)\n"  # to take the interpreter apart takes seconds
    )
    asked = json.dumps([[command, sorted(unneeded)] for command, unneeded in commands])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ran = subprocess.run(
        [sys.executable, "-c", code, asked],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {command: found for command, found in json.loads(ran.stdout).items() if found}


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "log.txt"), 2, "log.txt: No such file or directory"),
        (OSError("s3://b/run: the store was out\nfor 600 s"), 1, "s3://b/run: the store was out for 600 s"),
        (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device"),
        (PermissionError(), 1, "PermissionError"),
    ],
    ids=repr,
)
def test_trouble_with_storage_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, status: int, line: str
) -> None:
    def fails(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr("rayrec.commands.command", lambda verb: fails)
    assert cli.run(["train", "criteo_demo"]) == status
    assert capsys.readouterr().err == f"rayrec train: {line}\n"


def test_what_native_code_and_child_processes_print_stays_out_of_the_results() -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, '{"auroc": 0.5}\n')
    assert done.stderr == "a warning of Ray\na child\n"


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_what_libraries_print_stays_out_of_the_results(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(*_: object, **__: object) -> dict[str, float]:
        print("a warning of Ray")
        return {"auroc": 0.5}

    monkeypatch.setattr("rayrec.api.evaluate", score)
    monkeypatch.setattr("rayrec.api.predict_to", score)
    assert cli.run([verb, "run", "log", *(["--out", "scores"] if verb == "predict" else [])]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"auroc": 0.5}
    assert "a warning of Ray" in err


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    status = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--step", "5"), "no flag --step; did you mean --steps?"),
        (("--batchsize=5",), "no flag --batchsize; did you mean --batch-size?"),
        (("--shuffl", "none"), "no flag --shuffl; did you mean --train-data.shuffle or --eval-data.shuffle?"),
        (("--pin_memory",), "no flag --pin_memory; `rayrec config criteo_demo --help` shows every flag"),
        (("--qqqqqqq",), "no flag --qqqqqqq; `rayrec config criteo_demo --help` shows every flag"),
        (("more",), "takes no argument 'more'; `rayrec config criteo_demo --help` shows what it takes"),
        (
            ("--steps", "few"),
            "--steps: 'few' is no {None}|INT; `rayrec config criteo_demo --help` describes every flag",
        ),
        (("--batch-size", "0"), "batch_size: 0 must be at least 1"),
        (("--scaling.num-workers", "0"), "scaling.num_workers: 0 must be at least 1, and the least not above the most"),
        (("--config",), "--config needs a file"),
        (("--config=",), "--config needs a file"),
        (("--schema", "--steps", "5"), "--schema needs a file"),
        (("--config=a", "--config", "b"), "--config is given 2 times; give it once"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str) -> None:
    assert run(capsys, "config", "criteo_demo", *arguments) == (2, "", f"rayrec config: {line}\n")


def test_wrong_flags_of_other_commands_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "evaluate", "run") == (
        2,
        "",
        "rayrec evaluate: missing PATH; `rayrec evaluate --help` describes every flag\n",
    )
    assert (
        run(capsys, "predict", "run", "log", "--uot", "x")[2] == "rayrec predict: no flag --uot; did you mean --out?\n"
    )
    status, _, line = run(capsys, "predict", "run", "log", "--out", "x", "--recipe", "criteo_dem")
    assert (status, line) == (2, "rayrec predict: no recipe 'criteo_dem'; did you mean 'criteo_demo'?\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])  # the parser draws other boxes for each
def test_a_wrong_flag_is_one_line_in_every_encoding(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    code = "from rayrec import cli; cli.main(['config', 'criteo_demo', '--precison', 'bf16'])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "rayrec config: no flag --precison; did you mean --precision?\n"


@pytest.mark.parametrize("joined", [True, False])
def test_a_file_may_follow_its_flag_or_an_equals_sign(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, joined: bool
) -> None:
    config, schema = tmp_path / "config.yaml", tmp_path / "schema.yaml"
    config.write_text("\ufeffrecipe: clicks\nsteps: 7\n", encoding="utf-8")
    schema.write_text("{label: y, dense: [a], sparse: [b]}")
    given = (
        [(f"--config={config}",), (f"--schema={schema}",)]
        if joined
        else [("--config", str(config)), ("--schema", str(schema))]
    )
    status, out, err = run(capsys, "config", *given[0], *given[1])
    assert (status, err) == (0, "")
    resolved = yaml.safe_load(out)
    assert (resolved["steps"], resolved["workload"]["schema"]["dense"]) == (7, ["a"])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("recipe: clicks\nname: \u00e9\n".encode("latin-1"), "not UTF-8 text; save it with that encoding"),
        (b"recipe: [", "not YAML"),
        (b"recipe: clicks\nsteps: 2001-99-99\n", "not YAML (month must be in 1..12)"),
        (b"steps: 3\n", "names no recipe"),
        (b"recipe: click\n", "no recipe 'click'; did you mean 'clicks'?"),
        (b"recipe: clicks\nstep: 3\n", "step: TrainConfig has no such field; did you mean 'steps'?"),
        (b"recipe: clicks\nname: ..\n", "name: '..' is no name of a run"),
    ],
    ids=str,
)
def test_a_wrong_config_file_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, line: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    status, out, err = run(capsys, "config", f"--config={file}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"rayrec config: {file}: {line}")


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "-x", "a/b", "", "a b", "x" * 129, "a\n"])
def test_a_run_s_name_is_one_folder(name: str) -> None:
    with pytest.raises(InputError, match="is no name of a run"):
        recipes.criteo_demo().replace(name=name)


@pytest.mark.parametrize("name", ["a", "_b", "7", "a..b", "x" * 128, "größe_1.0-rc"])
def test_names_of_runs(name: str) -> None:
    assert recipes.criteo_demo().replace(name=name).name == name


def test_results_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"auroc": float("nan"), "logloss": 0.5})
    assert capsys.readouterr().out == '{\n  "auroc": null,\n  "logloss": 0.5\n}\n'


def test_the_summary_of_a_click_model_ends_with_the_report_and_what_can_be_done_next() -> None:
    from rayrec.commands.training import summary_rows

    summary = {
        "metrics": {"auroc": 0.7},
        "rows_per_s": 1.0,
        "blocked_fraction": 0.0,
        "rows": 1,
        "steps": 1,
        "wall_s": 1.0,
    }
    summary["checkpoint"] = "runs/a/checkpoints/step_00000001"
    rows = dict(summary_rows(summary, folder="runs/a"))
    assert rows["report"] == "runs/a/report.html"
    assert rows["next"].startswith("rayrec evaluate")
    assert "next" not in dict(summary_rows({**summary, "metrics": {"accuracy": 0.9}}, folder="runs/a"))


@pytest.mark.parametrize(
    ("given", "meant", "notice"),
    [
        ("--profile", "--preset", "--profile is now --preset; the old name will be removed in the next release"),
        ("--profile=nvt", "--preset=nvt", "--profile is now --preset"),
        ("--workload.profile.min-count", "--workload.preset.min-count", "--workload.profile.min-count is now"),
        ("--profile.steps", "--profile.steps", ""),
        ("profile", "profile", ""),
    ],
)
def test_an_old_flag_works_with_a_notice(
    capsys: pytest.CaptureFixture[str], given: str, meant: str, notice: str
) -> None:
    assert with_new_name(given) == meant
    printed = capsys.readouterr()
    assert printed.err.startswith(notice)
    assert (printed.err.count("\n"), printed.out) == (int(bool(notice)), "")


def test_an_old_flag_reaches_its_field(tmp_path: Path) -> None:
    config, _ = parse_config("train", ["criteo_kaggle", "--workload.profile.min-count", "7"])
    assert isinstance(config.workload, ClickWorkload)
    assert config.workload.preset.min_count == 7


def test_a_model_by_its_name() -> None:
    flags = ["criteo_kaggle", "--model", "finalnet", "--workload.model.first-tower", "8"]
    config, _ = parse_config("train", flags)
    assert isinstance(config.workload, ClickWorkload)
    assert config.workload.model == FinalNetConfig(embedding_dim=16, first_tower=(8,))
    with pytest.raises(InputError, match=r"^--model: no model finalnett; did you mean finalnet\?$"):
        parse_config("train", ["criteo_kaggle", "--model", "finalnett"])
    with pytest.raises(
        InputError, match=r"^--model: no model tree; there are .*dlrm, .*finalnet.*, and your own, by a recipe$"
    ):
        parse_config("train", ["criteo_kaggle", "--model=tree"])
    with pytest.raises(InputError, match=r"^--model: recipe mnist_resnet18 trains no click model$"):
        parse_config("train", ["mnist_resnet18", "--model", "dlrm"])
    with pytest.raises(InputError, match=r"did you mean --workload\.model\.first-tower"):
        parse_config("train", ["criteo_kaggle", "--model", "finalnet", "--workload.model.first-towe", "8"])


def test_q_silences_every_command_that_prepares_or_scores(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the result is printed; -q stands anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYREC_CACHE", str(tmp_path / "cache"))
    for words in (
        "generate -q log --rows 3000",
        "vocabulary log/train.txt -q --out vocabulary",
        "preprocess log/train.txt --out ready --format parquet -q",
        "split log/train.txt --out parts --by rows -q",
        "validate -q log/train.txt",
        "train criteo_demo --train-data.path log/train.txt --name run --steps 1 --batch-size 256 --scaling.num-workers 1 -q",
        "evaluate runs/run log/train.txt -q",
        "predict runs/run log/train.txt --out scores -q",
        "compare runs/run runs/run log/train.txt --json -q --resamples 100",
    ):
        status, out, err = run(capsys, *words.split())
        assert (status, err) == (0, ""), words
        assert json.loads(out)


def test_switches_may_follow_flags_of_a_search() -> None:
    own, rest = _own_flags(["clicks", "--tune.trials", "2", "-q", "--steps", "5", "--tune.metric", "auroc", "-v"])
    assert (own, rest) == (["--trials", "2", "--metric", "auroc"], ["clicks", "-q", "--steps", "5", "-v"])


def test_help_names_q(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("generate", "fetch", "vocabulary", "preprocess", "adopt", "split", "validate", "evaluate", "predict"):
        with pytest.raises(SystemExit):
            cli.run([verb, "--help"])
        assert "-q: shows only the result and errors" in capsys.readouterr().out, verb
    assert run(capsys, "export", "run", "--out", "x", "-q")[2].startswith("rayrec export: no flag -q")
