"""Imports of optional packages, and of user functions FILE.py:FUNCTION. Runs code that the user
passed, never a stored file's.
"""

import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Final, TypeVar

from rayrec.config import InputError, error_line

Returned = TypeVar("Returned")

EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "language": ("streaming", "tokenizers", "transformers", "accelerate"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}
"""Modules of each extra that are required together."""


def require(*modules: str, extra: str) -> None:
    """Check that modules of an extra (default: all in `EXTRAS`) are installed. Raises InputError
    with the fix.
    """
    for module in modules or EXTRAS[extra]:
        if importlib.util.find_spec(module) is None:
            raise InputError(f"{module} is not installed. Run pip install 'rayrec[{extra}]'.")


def is_in_file(name: str) -> bool:
    """Return whether a name has the form FILE.py:FUNCTION."""
    file, colon, _ = name.rpartition(":")
    return bool(colon) and file.endswith(".py")


def function_in_file(name: str, *, returns: type[Returned]) -> Callable[[], Returned]:
    """Return the function without arguments named FILE.py:FUNCTION. The file is imported once per
    process. Raises InputError if it is missing, fails, or does not return a `returns`.
    """
    file, _, function = name.rpartition(":")
    path = os.path.abspath(file)
    if not os.path.isfile(path):
        raise InputError(f"{file}: no such file. Custom recipes are named FILE.py:FUNCTION.")
    module_name = _module_name(path)
    module = sys.modules.get(module_name)
    if module is not None and getattr(module, "__file__", None) != path:
        raise InputError(
            f"{file}: another file with this name was already imported. Rename the file."
        )
    try:
        module = module or _imported(module_name, path)
        value = getattr(module, function, None)
        returned = value() if callable(value) else None
    except InputError:
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        # A syntax error may be in a file that this one imports.
        location = (
            (error.filename, error.lineno)
            if isinstance(error, SyntaxError)
            else (path, lines[-1] if lines else 1)
        )
        raise InputError(
            f"{location[0]}, line {location[1]}: {error_line(error)}. Fix the file."
        ) from error
    if not callable(value):
        raise InputError(f"{file}: function '{function}' not found")
    if not isinstance(returned, returns):
        raise InputError(f"{file}: {function}() must return a rayrec.{returns.__name__}")
    return value


def _module_name(path: str) -> str:
    """Return the file's name, or a unique name if another module has it or would be shadowed, such
    as mlflow.
    """
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
