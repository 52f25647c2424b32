"""HTTP server for trained click models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """Build a Ray Serve application that scores over HTTP. Use `import_path: rayrec.serve:build` in
    a Serve config file, or `serve run rayrec.serve:build model=PATH`. `args` has `model`
    (checkpoint, run or export), optionally `shadow` and `autoscaling` (Ray Serve's
    autoscaling_config), and fields of `rayrec.serve.config.ServeConfig`. Raises InputError for
    invalid ones.
    """
    from rayrec.serve.deployment import build_application

    return build_application(args)
