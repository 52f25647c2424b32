"""Train, check, export and swap in one day's model: `python nightly.py nightly.yaml`, every night
(docs/cookbook/daily.md).

Outputs are atomic and runs resume by name, so call it again after any failure. It ends with status
2 and one line if a gate fails; the server keeps its model then, and the next night starts from the
last good one.
"""

import argparse
import re
import shlex
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from typing import Any

import yaml

import rayrec
from rayrec import ComparisonGates, Gates, InputError, recipes, storage

SPLIT = "last_file"  # each day's last file is not trained on: it checks the model


def run_night(job: dict[str, Any], day: str) -> None:
    """Make the model of `day` (YYYY-MM-DD) from the last good one, and swap it in. Raises
    InputError if a gate fails.
    """
    rows = storage.join(job["log"], f"dt={day}")
    place = job["place"]
    run = f"{place}/runs/night-{day}"
    vocabulary = f"{place}/vocabularies/{day}"
    exported = f"{place}/exports/{day}"
    good = [
        name
        for name in storage.list_folder(f"{place}/exports")
        if is_complete(f"{place}/exports/{name}/manifest.json")
    ]
    if any(name > day for name in good):
        raise InputError(
            f"{place}/exports/{max(good)}: is of a later day than {day}; remove it to go back"
        )
    before = max((name for name in good if name < day), default=None)

    config = recipes.load_config(yaml.safe_dump(job["train"]), source="train")
    settings = {"schema": config.workload.schema, "preset": config.workload.preset.name}
    require(
        rayrec.validate(
            rows, gates=Gates().updated(job["gates"], where="gates."), **settings
        ).failures,
        section="gates",
    )

    workload: dict[str, Any] = {"preset": {"split": {"kind": SPLIT}}}
    if before:
        if not is_complete(f"{vocabulary}/preprocessor.json"):
            storage.remove_folder(vocabulary)  # what a killed upload left
            earlier = f"{place}/runs/night-{before}"
            rayrec.vocabulary(
                rows, out=vocabulary, extend=earlier, split=SPLIT, schema=config.workload.schema
            )
        workload["preprocessor"] = vocabulary
        config = config.replace(init_from=f"{place}/runs/night-{before}")
    config = config.replace(
        name=f"night-{day}",
        storage_path=f"{place}/runs",
        train_data={"path": rows},
        workload=workload,
    )
    rayrec.train(config)  # resumes, or returns at once if it is finished

    if before:
        unseen = storage.list_files(rows)[-1].path
        models = [f"{place}/runs/night-{before}", run]
        gates = ComparisonGates().updated(job["comparison"], where="comparison.")
        found = rayrec.compare(models, unseen, gates=gates, resamples=200)
        print(
            day,
            {
                path: round(model["auroc"], 4)
                for path, model in zip(models, found["models"], strict=True)
            },
        )
        require(found["failures"], section="comparison")
    if not is_complete(f"{exported}/manifest.json"):
        storage.remove_folder(exported)
        rayrec.export(run, out=exported, quantize=job["quantize"])
    if job["swap"]:
        command = [word.format(export=exported) for word in shlex.split(job["swap"])]
        if status := subprocess.run(command, check=False).returncode:
            raise SystemExit(
                f"nightly: {shlex.join(command)} ended with status {status}; the server has its "
                "old model"
            )

    oldest = sorted({*good, day})[-job["keep"] :][0]
    for folder in ("runs", "vocabularies", "exports"):
        for name in storage.list_folder(f"{place}/{folder}"):
            dated = re.fullmatch(r"(?:night-)?(\d{4}-\d\d-\d\d)", name)
            if dated and dated[1] < oldest:
                storage.remove_folder(f"{place}/{folder}/{name}")


def is_complete(manifest: str) -> bool:
    """Return whether the file that is written last is there."""
    return storage.exists(manifest)


def require(failures: list[str], *, section: str) -> None:
    """Raise InputError if a gate failed. Names fields of a section of the settings instead of flags
    of a command.
    """
    if failures:
        fields = re.sub(
            r"(?:--)?\bgates\.([\w-]+)",
            lambda flag: f"{section}.{flag[1].replace('-', '_')}",
            "; ".join(failures),
        )
        raise InputError(fields)


def main(arguments: list[str] | None = None) -> None:
    """Run a night; the day is yesterday (UTC) unless `--date` is given."""
    parser = argparse.ArgumentParser(description="Train, check, export and swap in one day's model")
    parser.add_argument("file", help="settings, such as nightly.yaml")
    yesterday = datetime.now(UTC).date() - timedelta(days=1)
    parser.add_argument(
        "--date",
        type=date.fromisoformat,
        default=yesterday,
        help="day of the log; default yesterday (UTC)",
    )
    given = parser.parse_args(arguments)
    try:
        run_night(yaml.safe_load(storage.read_text(given.file)), given.date.isoformat())
    except InputError as error:
        print(f"nightly: {given.date}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
