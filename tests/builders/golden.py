"""Values that stay as they are, in the files of tests/golden."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden"


def check_golden(name: str, found: Any, *, case: str | None = None, tolerance: float = 0.0) -> None:
    """Compare JSON values with tests/golden/NAME.json, or its entry for `case`, or write them there
    if RAYREC_WRITE_GOLDEN=1. `tolerance`: how far floats may be off, relative to the larger of
    their size and 1. `{"any": [...]}` in the file has the values of several processors:
    NumPy's logarithms differ in the last bit with AVX-512, and so does a hash of their mean.
    """
    path = FOLDER / f"{name}.json"
    if os.environ.get("RAYREC_WRITE_GOLDEN") == "1":
        values = _rounded(found) if tolerance else found
        if case is not None:
            others = json.loads(path.read_text()) if path.exists() else {}
            values = dict(sorted({**others, case: values}.items()))
        path.write_text(_dumped(values))
    golden = json.loads(path.read_text())
    different = list(_differences(found, golden if case is None else golden[case], tolerance))
    reported = "\n".join(different[:20])
    assert not different, (
        f"{case or name}: {len(different)} values are not those of {path}:\n{reported}"
    )


def _dumped(values: Any) -> str:
    """JSON with a line for each member of the first two levels at most."""
    if not isinstance(values, dict) or not values:
        return json.dumps(values) + "\n"
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _alternative(found: Any, golden: Any) -> Any:
    """Return the value to compare with: of several, the one that was found, if it is among them."""
    has_several = isinstance(golden, dict) and list(golden) == ["any"]
    return found if has_several and found in golden["any"] else golden


def _differences(found: Any, golden: Any, tolerance: float, where: str = "") -> Iterator[str]:
    golden = _alternative(found, golden)
    if isinstance(found, dict) and isinstance(golden, dict) and list(found) == list(golden):
        for key in found:
            yield from _differences(found[key], golden[key], tolerance, f"{where}/{key}")
    elif (
        isinstance(found, (list, tuple)) and isinstance(golden, list) and len(found) == len(golden)
    ):
        for number, pair in enumerate(zip(found, golden, strict=True)):
            yield from _differences(*pair, tolerance, f"{where}/{number}")
    elif isinstance(found, float) and isinstance(golden, float):
        if not math.isclose(found, golden, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{where}: {found}, not {golden}"
    elif found != golden or type(found) is not type(golden):
        yield f"{where}: {found}, not {golden}"
