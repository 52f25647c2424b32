"""User errors detected before anything starts: one line, exit status 2, and no Ray."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from builders.faults import raising

from rayrec import cli

CRITEO = "\t".join(["1", *map(str, range(13)), *(f"{number:08x}" for number in range(26))]) + "\n"
HEADER = (
    "label\t"
    + "\t".join([f"I{number}" for number in range(13)] + [f"C{number}" for number in range(26)])
    + "\n"
)
SCHEMA = "{label: click, dense: [age], sparse: [user, item]}"
Make = Callable[[Path], list[str]]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def command(line: str, **files: str | bytes | pa.Table) -> Make:
    """Give a command, after variables such as A=1. FOLDER is the test's, with these files; two
    underscores stand for a dot.
    """

    def make(folder: Path) -> list[str]:
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            if isinstance(content, pa.Table):
                pq.write_table(content, path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return [argument.replace("FOLDER", str(folder)) for argument in line.split()]

    return make


def train(flags: str) -> Make:
    return command(f"train criteo_demo {flags}")


def log(content: bytes | str) -> Make:
    return command("train criteo_demo --train-data.path FOLDER/train.txt", train__txt=content)


def table(content: str | pa.Table, schema: str = SCHEMA, *, verb: str = "train") -> Make:
    file = "log__csv" if isinstance(content, str) else "log__parquet"
    line = (
        f"{verb} clicks --schema=FOLDER/schema.yaml --train-data.path "
        f"FOLDER/{file.replace('__', '.')}"
    )
    return command(line, schema__yaml=schema, **{file: content})


def good(flags: str, *variables: str) -> Make:
    return command(
        " ".join(
            (
                *variables,
                "train criteo_demo",
                "--train-data.path FOLDER/train.txt --storage-path FOLDER/runs",
                flags,
            )
        ),
        train__txt=CRITEO * 50,
    )


MISTAKES: dict[str, tuple[Make, str]] = {
    # the command line
    "unknown command": (command("trainn criteo_demo"), "did you mean 'train'?"),
    "unknown recipe": (command("train criteo_dem"), "did you mean 'criteo_demo'?"),
    "no recipe": (command("train"), "missing recipe"),
    "no run": (command("resume"), "missing run. Usage: rayrec resume RUN"),
    "unknown flag": (train("--num-workers 2"), "did you mean --scaling.num-workers?"),
    "unknown model": (
        train("--model deepFM"),
        "model: unknown model deepFM, did you mean 'deepfm'?",
    ),
    "epochs in words": (train("--epochs ten"), "--epochs: must be a valid integer"),
    "log as recipe": (
        command("train FOLDER/train.txt", train__txt=CRITEO),
        "For data: rayrec train criteo_demo --data",
    ),
    "table as recipe": (
        command("train FOLDER/log.csv", log__csv="a\n"),
        "rayrec schema FOLDER/log.csv --out schema.yaml, then",
    ),
    "syntax of recipe file": (
        command("train FOLDER/a.py:f", a__py="\ndef f(:\n"),
        "a.py, line 2: SyntaxError: invalid syntax",
    ),
    "recipe file fails": (
        command("train FOLDER/b.py:f", b__py="def f():\n  x.y\n"),
        "b.py, line 2: NameError: name 'x' is not",
    ),
    "recipe file absent": (command("train own.py:mine"), "own.py: no such file"),
    "workers 0": (
        train("--scaling.num-workers 0"),
        "num_workers: must be at least 1, and min at most max, got 0",
    ),
    "negative learning rate": (
        train("--workload.dense-optimizer.learning-rate -1"),
        "learning_rate",
    ),
    "port": (
        command("serve model --port 99999"),
        "port: must be at least 1 and at most 65535, got 99999",
    ),
    "quantize": (command("export run --out x --quantize int3"), "int3"),
    # configuration files
    "config absent": (command("train --config=FOLDER/none.yaml"), "none.yaml: no such file"),
    "other type": (
        command("train --config=FOLDER/a.yaml", a__yaml="recipe: clicks\nsteps: many"),
        "steps: has the wrong type",
    ),
    # data
    "no data": (command("train criteo_demo"), "--data PATH"),
    "data absent": (train("--train-data.path FOLDER/none"), "none: no such file or folder"),
    "empty folder": (train("--train-data.path FOLDER"), "contains no data files"),
    "empty file": (log(""), "train.txt: no usable rows; it is empty"),
    "header alone": (log(HEADER), "its first lines cannot be parsed"),
    "comma for tab": (log(CRITEO.replace("\t", ",") * 9), "separated by commas"),
    "UTF-16": (log((CRITEO * 9).encode("utf-16")), "UTF-16"),
    "binary": (log(bytes(range(256)) * 99), "binary file"),
    "table for Criteo's recipe": (
        command("train criteo_demo --data FOLDER/a.csv", a__csv="y,b\n1,2\n"),
        "drafts one for `",
    ),
    "no schema": (
        command("train clicks --data FOLDER/a.csv", a__csv="y,b\n"),
        "`rayrec schema FOLDER/a.csv --out FILE` drafts it",
    ),
    "other tools' schema": (
        table("a\n", "{target: y, numerical: [a]}"),
        "has fields target, numerical; name them label, dense",
    ),
    "labels in words": (
        table("click,age,user,item\nyes,1,2,3\nno,1,2,3\n"),
        "found no, yes in column click; derive one,",
    ),
    "ratings": (
        table("click,age,user,item\n" + "".join(f"{n},1,2,3\n" for n in range(1, 6))),
        "in the schema label: {name: click, at_least: 4}\n",
    ),
    "text for a language model": (
        command("train gpt2_tiny --data FOLDER/a", a="b\n"),
        "must contain token blocks. Create them",
    ),
    "column absent": (table("click,age,user\n1,2,3\n"), "no column named item"),
    "label absent": (table("age,user,item\n1,2,3\n"), "no column named click"),
    "columns twice": (table("click,age,user,item,item\n1,2,3,4,5\n"), "2 columns named item"),
    "column absent from Parquet": (
        table(pa.table({"click": [1], "age": [2], "user": [3]})),
        "no column named item",
    ),
    "bad schema": (table("a\n1\n", "{label: click, dens: [age]}"), "did you mean 'dense'?"),
    "schema not a mapping": (table("a\n1\n", "[age]"), "must be a mapping, such as"),
    "planned data absent": (
        command("plan criteo_demo --train-data.path FOLDER/none"),
        "none: no such file or folder",
    ),
    "dense columns alone": (
        command(
            "train clicks_din --schema=FOLDER/schema.yaml --data FOLDER/log.csv",
            schema__yaml="{label: click, dense: [age]}",
            log__csv="click,age\n1,2\n",
        ),
        "must have a sparse column for DINConfig",
    ),
    "Preprocessor absent": (good("--workload.preprocessor FOLDER/none"), "none"),
    # places
    "storage path is a file": (
        good("--storage-path FOLDER/train.txt"),
        "storage_path: must be a folder, got the file",
    ),
    "bad S3 URL": (train("--train-data.path s3:///key"), "bucket not found"),
    "S3 option": (train("--train-data.path s3://b/k?colour=red"), "colour is not an option"),
    "storage scheme": (good("--storage-path nosuch://x"), "nosuch://x"),
    "MLflow": (
        good("--trackers.mlflow --trackers.mlflow-uri s3://bucket/x"),
        "MLflow does not support s3",
    ),
    # machines
    "workers without CPUs": (
        good("--workers 9 --scaling.cpus-per-worker 1 --cluster.num-cpus 2"),
        "9 workers need 9 CPU",
    ),
    "GPUs on a machine without": (
        good("--gpus 1"),
        "all machines together have 0 GPU. To train on CPUs, omit --gpus and set",
    ),
    "no Ray there": (
        good("", "RAY_ADDRESS=127.0.0.1:1"),
        "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there (Connection",
    ),
    "no such host": (
        good("", "RAY_ADDRESS=a.invalid:1"),
        "RAY_ADDRESS=a.invalid:1: no Ray cluster answers there (",
    ),
    "dashboard": (
        good("", "RAY_ADDRESS=http://a:8265"),
        "RAY_ADDRESS=http://a:8265: must be the address of a Ray cluster. Use",
    ),
    "address without host": (
        good("", "RAY_ADDRESS=6379"),
        "RAY_ADDRESS=6379: must be the address of a Ray cluster. Use HOST:",
    ),
    "address without number": (good("", "RAY_ADDRESS=a:b"), " Use HOST:PORT of "),
    "number too high": (
        good("--cluster.address 127.0.0.1:70000"),
        "127.0.0.1:70000: no Ray cluster answers there (",
    ),
    "no Ray of a server": (
        command("RAY_ADDRESS=127.0.0.1:1 serve --stop"),
        "or omit it (and unset RAY_ADDRESS) to use",
    ),
    "supervise": (
        command("supervise --address a:b -- train criteo_demo --storage-path FOLDER"),
        "URL of a Ray dashboard, such",
    ),
    "port in use": (
        command("serve FOLDER --port IN_USE", manifest__json="{}"),
        " (Address already in use, by process ",
    ),
    "several workers in one process": (
        good("--scaling.num-workers 2 --cluster.address none"),
        "scaling.num_workers 2",
    ),
    "threads at an address": (
        command("vocabulary log --out v --engine threads --address host:1"),
        "engine threads",
    ),
    "tokenizer absent": (
        command("preprocess FOLDER --format mds --out FOLDER/m --tokenizer none"),
        "tokenizer: none not found",
    ),
    "unknown data set": (
        command("fetch criteo_kagle --out FOLDER/x"),
        "did you mean 'criteo_kaggle'",
    ),
    "fetch to a URL": (command("fetch mnist --out s3://bucket/x"), "must be a local folder"),
    "output exists": (
        command("vocabulary FOLDER --out FOLDER"),
        "exists already; remove it or choose another --out",
    ),
    "log absent": (command("vocabulary FOLDER/none.txt --out FOLDER/x"), "none.txt: no such file"),
    "unknown preset": (
        command("vocabulary FOLDER/none.txt --out FOLDER/x --preset torchrek"),
        "did you mean 'torchrec'",
    ),
    "schema absent": (
        command("vocabulary FOLDER/none.txt --out FOLDER/x --schema FOLDER/none.yaml"),
        "none.yaml",
    ),
    "teacher without weight": (
        good("--workload.teacher.checkpoint FOLDER/none"),
        "teacher.weight: must be above 0",
    ),
    # checkpoints
    "checkpoint absent": (
        command("evaluate FOLDER/none FOLDER"),
        "none: no such folder. Pass a run, or",
    ),
    "checkpoint damaged": (command("evaluate FOLDER FOLDER", manifest__json="{"), "manifest.json"),
    "no run to report on": (command("report FOLDER"), "not a run folder"),
    "no run to watch": (command("top FOLDER --once"), "not a run folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_user_error_prints_one_line_before_start(
    name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    make, expected = MISTAKES[name]
    if name == "GPUs on a machine without":
        monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", raising(AssertionError("Ray was started")))
    # Another test of this process may use Ray.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    arguments = make(tmp_path)
    while "=" in arguments[0]:
        monkeypatch.setenv(*arguments.pop(0).split("=", 1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        status = cli.run([port if argument == "IN_USE" else argument for argument in arguments])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("rayrec")
    assert "Traceback" not in err
    assert expected.replace("FOLDER", str(tmp_path)) in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_prints_one_line(tmp_path: Path, capsys: Capture) -> None:
    arguments = log(CRITEO)(tmp_path)
    (tmp_path / "train.txt").chmod(0)
    assert cli.run(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
