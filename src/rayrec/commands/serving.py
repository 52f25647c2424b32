"""Serving commands: serve, and the function serving."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

from rayrec.commands.data import _console
from rayrec.commands.declaration import Argument, command
from rayrec.config import InputError

if TYPE_CHECKING:
    from rayrec.observe.console import Console
    from rayrec.serve.config import ServerConfig
    from rayrec.serve.server import Server

_MISSING_MODEL = "missing model. Set the folder of a checkpoint, a run or an export."


@command(
    "Serve",
    options=[("", "rayrec.serve.config:ServerConfig")],
    examples=(
        "rayrec serve runs/demo --port 8000",
        "rayrec serve exports/new --swap --cluster.address auto",
        "rayrec serve --swap-table items=new.csv --cluster.address auto",
    ),
    runner="rayrec.serve.shutdown:run_until_signal",
)
def serve(
    model: Annotated[
        str | None,
        Argument(
            "folder of a checkpoint, a run (the checkpoint in its summary, otherwise the latest), "
            "or an export",
            "CHECKPOINT_OR_EXPORT",
        ),
    ] = None,
    *,
    swap: Annotated[
        bool, Argument("swap the model of the running server without losing requests")
    ] = False,
    rollback: Annotated[bool, Argument("restore the previous model of the running server")] = False,
    no_shadow: Annotated[bool, Argument("remove the shadow model of the running server")] = False,
    stop: Annotated[
        bool, Argument("stop the running server, even if its process was killed")
    ] = False,
    cluster_address: Annotated[
        str | None,
        Argument(
            "HOST:PORT or auto: a running Ray cluster; default RAY_ADDRESS, otherwise a local Ray",
            flag="cluster.address",
        ),
    ] = None,
    started: Callable[[dict[str, Any]], None] | None = None,
    console: "Console | None" = None,
    **options: Any,
) -> None:
    """Score rows over HTTP until Ctrl-C or SIGTERM, or change a running server.

    See `rayrec.serve.server.serve_forever`. `swap`, `rollback`, `no_shadow`, or `shadow` or
    `swap_table` without a model change the server that runs on the Ray cluster at
    `cluster_address`, and `stop` ends it. No other options are allowed then, but `swap_table` with
    `swap`. `options` are the fields of `rayrec.serve.config.ServerConfig`.

    Calls `started` with a description of the served models. Raises InputError for an unusable model
    or address.
    """
    from rayrec.serve import server
    from rayrec.serve.config import ServerConfig

    report = started or (lambda served: None)
    config = ServerConfig().updated(options)
    actions = {"swap": swap, "rollback": rollback, "no_shadow": no_shadow, "stop": stop}
    requested = [name for name, is_set in actions.items() if is_set]
    if model is None and not requested:
        requested = [name for name in ("shadow", "swap_table") if getattr(config, name)]
    if requested:
        report(_change_server(requested, model, config, cluster_address))
    elif model is None:
        raise InputError(_MISSING_MODEL)
    else:
        server.serve_forever(
            model,
            config=config,
            address=cluster_address,
            console=_console(console),
            started=report,
        )


# A server is changed through its control actor on the Ray cluster, by any process that reaches the
# cluster. Actions, of which a call has one:
#
#   swap        the model becomes the active one as soon as it is loaded and checked
#   swap_table  the active model looks up side tables of other files; also part of a swap
#   rollback    the model and tables before become active again
#   shadow      a model gets copies of requests, and its answers are only compared
#   no_shadow   the shadow model is removed
#   stop        the server ends, even if the process that started it was killed
def _change_server(
    requested: list[str], model: str | None, config: "ServerConfig", address: str | None
) -> dict[str, Any]:
    """Change the running server and return its description. Raises InputError for several actions,
    and for a model or options that the action does not use.
    """
    from rayrec.serve import control
    from rayrec.serve.config import table_paths

    if requested[1:]:
        raise InputError(
            "swap, swap_table, rollback, shadow, no_shadow and stop: must be set one at a time, "
            f"got {' and '.join(requested)}"
        )
    (action,) = requested
    # An option of a start, such as a port, would be ignored here. It is refused, so that nobody
    # believes that it was applied.
    default = vars(type(config)())
    unused = [name for name, value in default.items() if getattr(config, name) != value]
    used = [action]
    if action == "swap":
        used.append("swap_table")
    unused = [name for name in unused if name not in used]
    if unused:
        raise InputError(f"{action}: changes a running server. Omit {', '.join(unused)}.")
    if model is not None and action != "swap":
        raise InputError(f"{model}: rollback, no_shadow and stop take no model. Omit it.")
    tables = table_paths(config.swap_table)
    if action == "swap":
        if model is None:
            raise InputError(_MISSING_MODEL)
        return control.swap(model, tables=tables, address=address)
    if action == "swap_table":
        return control.swap_table_files(tables, address=address)
    if action == "rollback":
        return control.roll_back(address=address)
    if action == "stop":
        return control.stop(address=address)
    # With `no_shadow`, the configuration has none, which removes the server's.
    return control.set_shadow(config.shadow, address=address)


def serving(
    model: str,
    *,
    shadow: str | None = None,
    swap_table: Sequence[str] = (),
    cluster_address: str | None = None,
    console: "Console | None" = None,
    **options: Any,
) -> "AbstractContextManager[Server]":
    """Run a server in a context: `with rayrec.serving("runs/demo", port=8123) as server: ...`.

    The server's `url` accepts requests. `swap_table` are side tables as NAME=PATH, instead of those
    of the model's training. `options` are fields of `rayrec.serve.config.ServeConfig`.
    Raises like `serve`.
    """
    from rayrec.serve.config import ServeConfig, table_paths
    from rayrec.serve.server import serving as run

    return run(
        model,
        config=ServeConfig().updated(options),
        address=cluster_address,
        shadow=shadow,
        tables=table_paths(swap_table),
        console=_console(console),
    )
