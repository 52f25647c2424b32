"""HTTP server for trained click models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """Build a Ray Serve application that scores over HTTP. Use it as `import_path: rayrec.serve:build` in a Serve configuration
    file, or run `serve run rayrec.serve:build model=PATH`. `args` has `model` (checkpoint, run or export), optionally `shadow`
    and `autoscaling` (Ray Serve's autoscaling_config), and fields of `rayrec.serve.config.ServeConfig`. Raises InputError for an
    invalid or unknown one."""
    from rayrec.serve.deployment import build_application

    return build_application(args)
