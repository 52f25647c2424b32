"""Runs a notebook's cells on Ray nodes in network namespaces of this machine, and stores their
outputs in it.

    python tools/run_notebook.py examples/dlrm_nodes.ipynb

Needs root and what `tests/hosts/nodes.py` lists. The cells run on the head, in a new folder that
all nodes share. Outputs are the cells' standard output and the value of their last line, as in
Jupyter; progress on standard error is shown, but not stored.
"""

import ast
import contextlib
import io
import json
import os
import pprint
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NODES: dict[str, list[dict[str, float]]] = {
    "dlrm_nodes": [{"cpus": 0}, *[{"cpus": 1, "accelerator": 1}] * 2, *[{"cpus": 2}] * 2],
    "gpt2_nodes": [{"cpus": 1}, *[{"cpus": 4, "accelerator": 4}] * 2],
}
"""Nodes of each notebook's cluster, the head first."""


def run(path: Path) -> dict[str, Any]:
    """Run a notebook of `NODES` on its cluster. Return it with its outputs. Raises RuntimeError if
    a cell fails.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from hosts.nodes import Network

    with tempfile.TemporaryDirectory() as shared, Network() as network:
        head, *_ = network.cluster(*NODES[path.stem])
        out = Path(shared, "executed.json")
        command = (sys.executable, __file__, "--here", str(path.resolve()), str(out))
        done = head.start(*command, RAY_ADDRESS=network.head_address).wait(timeout_s=900)
        if done.status:
            raise RuntimeError(f"{path}: a cell fails:\n{done.err[-4000:]}")
        sys.stderr.write(done.err)
        executed: dict[str, Any] = json.loads(out.read_text())
        return executed


def run_cells(path: Path, out: Path) -> None:
    """Run the cells in this process, in the folder of `out`, and write the notebook with its
    outputs to `out`.
    """
    os.chdir(out.parent)
    executed = json.loads(path.read_text())
    namespace = {"__name__": "__main__"}
    codes = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, 1):
        cell["execution_count"] = number
        cell["outputs"] = _outputs("".join(cell["source"]), namespace, number)
    out.write_text(json.dumps(executed, indent=1) + "\n")


def _outputs(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell -> its outputs in the notebook's format."""
    *statements, last = ast.parse(source).body
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(statements, []), f"cell {number}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
        else:
            exec(compile(ast.Module([last], []), f"cell {number}", "exec"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append(
            {"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())}
        )
    if value is not None:
        data = {"text/plain": _lines(pprint.pformat(value, sort_dicts=False))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(value._repr_html_())
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--here":
        run_cells(*map(Path, arguments[1:]))
    for path in map(Path, arguments if arguments[0] != "--here" else ()):
        path.write_text(json.dumps(run(path), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
