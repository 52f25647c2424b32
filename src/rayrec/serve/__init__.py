"""Serves a trained click model over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """An application for Ray Serve that scores over HTTP: `import_path: rayrec.serve:build` in its configuration file, or
    `serve run rayrec.serve:build model=PATH`.

    `args`: `model` (a checkpoint, a run or an export), perhaps `shadow` and `autoscaling` (Ray Serve's autoscaling_config), and
    fields of `rayrec.serve.config.ServeConfig`. Raises InputError for anything else.
    """
    from rayrec.serve.deployment import build_application

    return build_application(args)
