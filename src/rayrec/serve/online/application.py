"""An application that Ray Serve itself starts, from a configuration file or `serve run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import yaml

from rayrec.config import InputError
from rayrec.serve.online.deployment import make_application, read_user_config
from rayrec.serve.online.settings import ServeConfig

if TYPE_CHECKING:
    from ray.serve import Application

_PROXY_FIELDS: Final = ("host", "port")
_TEXT_FIELDS: Final = ("token_file", "token_env", "device", "ingress", "host", "recipe")


def build_application(args: Mapping[str, Any]) -> Application:
    """See `rayrec.serve.build`."""
    values = dict(args)
    configured = read_user_config({name: values.pop(name, None) for name in ("model", "shadow")})
    autoscaling = _parsed("autoscaling", values.pop("autoscaling", None))
    values = {name: _parsed(name, value) for name, value in values.items()}
    config = ServeConfig(ingress="serve").updated(values)
    if config.ingress == "auto":
        config = config.replace(ingress="serve")
    _check(config, values, autoscaling)
    return make_application(
        config,
        token_digest=config.token_digest(),
        model=configured.model,
        shadow=configured.shadow,
        autoscaling=autoscaling,
    )


def _parsed(name: str, value: Any) -> Any:
    """`serve run` gives every value as text."""
    if not isinstance(value, str) or name in _TEXT_FIELDS:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"{name}: {value!r} cannot be read as YAML") from None


def _check(config: ServeConfig, given: Mapping[str, Any], autoscaling: Any) -> None:
    if autoscaling is not None and not isinstance(autoscaling, Mapping):
        raise InputError("autoscaling: must be a mapping, such as {min_replicas: 1, max_replicas: 8}")
    if autoscaling is not None and "replicas" in given:
        raise InputError("autoscaling: excludes replicas; give min_replicas and max_replicas in autoscaling")
    if autoscaling is not None and config.ingress == "direct":
        raise InputError("autoscaling: Ray Serve does not see the requests of the direct ingress; leave ingress out")
    if config.ingress == "serve":
        for name in _PROXY_FIELDS:
            if name in given:
                raise InputError(
                    f"{name}: Ray Serve's proxies listen; set it in http_options of the Serve configuration file"
                )
