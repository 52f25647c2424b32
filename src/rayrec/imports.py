"""Imports that may fail: optional packages, and functions of the user's by their file, FILE.py:FUNCTION.

Only what a person gives is run, never what a file names.
"""

import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Final, TypeVar

from rayrec.config import InputError

Returned = TypeVar("Returned")

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "language": ("streaming", "tokenizers", "transformers", "accelerate"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
"""Modules of extras that are needed together."""


def require(*modules: str, extra: str) -> None:
    """Raises InputError, with what fixes it, where modules of an extra (default: all of `EXTRAS`) are not installed."""
    for module in modules or EXTRAS[extra]:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed; pip install 'rayrec[{extra}]'")


def is_in_file(name: str) -> bool:
    """Whether a name is FILE.py:FUNCTION."""
    file, colon, _ = name.rpartition(":")
    return bool(colon) and file.endswith(".py")


def function_in_file(name: str, *, returns: type[Returned]) -> Callable[[], Returned]:
    """The function without arguments that FILE.py:FUNCTION names; the file is run as a module, once a process.

    Raises InputError if there is none, or if it does not return a `returns`.
    """
    file, _, function = name.rpartition(":")
    path = os.path.abspath(file)
    if not os.path.isfile(path):
        raise InputError(f"{file}: no such file; a recipe of your own is named FILE.py:FUNCTION")
    module_name = _module_name(path)
    module = sys.modules.get(module_name)
    if module is None:
        module = _imported(module_name, path)
    elif getattr(module, "__file__", None) != path:
        raise InputError(f"{file}: another file of this name was imported before; rename the file")
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{file}: has no function '{function}'")
    if not isinstance(found(), returns):
        raise InputError(f"{file}: {function}() returns no rayrec.{returns.__name__}")
    return found


def _module_name(path: str) -> str:
    """The name of the file, or one of its own if another module has this name or would be imported by it, such as mlflow."""
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules:
        other = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name.partition(".")[0])
        other = spec.origin if spec else path
    return name if other == path else f"recipe_file_{name}"


def _imported(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
