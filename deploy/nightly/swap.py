"""Set the model of a Deployment or RayService to an export: `swap.py
deployments/NAME|rayservices/NAME URL EXPORT`, in a pod.

Waits until the Service at URL answers with the new model. Ends with status 1 if the export cannot
be loaded, or after 15 minutes; the old model serves then. The pod's ServiceAccount may get and
patch the object.
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from rayrec.inference.model import open_served

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
SERVER = os.environ.get("KUBERNETES_SERVER", "https://kubernetes.default.svc")
GROUPS = {"deployments": "apps/v1", "rayservices": "ray.io/v1"}
PATCHES = {
    "deployments": "application/strategic-merge-patch+json",
    "rayservices": "application/merge-patch+json",
}


def patch_of(kind: str, found: dict[str, Any], export: str) -> dict[str, Any]:
    """Return the patch that sets the model: variable MODEL of a Deployment, `user_config` of a
    RayService.
    """
    if kind == "deployments":
        (container,) = found["spec"]["template"]["spec"]["containers"]
        changed = {"name": container["name"], "env": [{"name": "MODEL", "value": export}]}
        return {"spec": {"template": {"spec": {"containers": [changed]}}}}
    config = yaml.safe_load(found["spec"]["serveConfigV2"])
    for application in config["applications"]:
        for deployment in application["deployments"]:
            deployment["user_config"]["model"] = export
    return {"spec": {"serveConfigV2": yaml.safe_dump(config, sort_keys=False)}}


def call(path: str, patch: dict[str, Any] | None = None, media_type: str = "") -> dict[str, Any]:
    """Call Kubernetes' API as the pod's ServiceAccount."""
    headers = {
        "authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
        "content-type": media_type or "application/json",
    }
    data = None if patch is None else json.dumps(patch).encode()
    request = urllib.request.Request(
        SERVER + path, data, headers, method="GET" if patch is None else "PATCH"
    )
    trusted = (
        ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        if SERVER.startswith("https:")
        else None
    )
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def version_at(url: str) -> str | None:
    """Return the version of the model that the Service serves, None if it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            return str(json.load(answer)["model"])
    except OSError:
        return None


def main(name: str, url: str, export: str, *, wait_s: float = 900.0, pause_s: float = 2.0) -> None:
    """Load the export, patch the object, and wait until the Service answers with its version."""
    kind, _, _ = name.partition("/")
    version = open_served(export).version  # raises before anything changes
    path = f"/apis/{GROUPS[kind]}/namespaces/{(ACCOUNT / 'namespace').read_text().strip()}/{name}"
    call(path, patch_of(kind, call(path), export), PATCHES[kind])
    deadline_s = time.monotonic() + wait_s
    while (found := version_at(url)) != version:
        if time.monotonic() > deadline_s:
            sys.exit(
                f"swap: {url} serves {found}, not {version}, after {wait_s:g} s; see the logs of "
                f"{name}"
            )
        time.sleep(pause_s)
    print(f"{name} serves {version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
