"""How full Ray's object store is while training runs, asked for in the background."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, final

_logger = logging.getLogger(__name__)
_POLL_S: Final = 3.0
_TIMEOUT_S: Final = 5.0
_MOST_FAILURES: Final = 10
"""In a row, after which nobody asks any more: a cluster that is busy answers again."""


@final
class StoreWatch:
    """Asks Ray every few seconds, in a thread. Trouble with that, ten times in a row, ends the asking, and nothing else."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._spilled_before: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="store-watch", daemon=True)
        self._thread.start()

    def latest(self) -> dict[str, int]:
        """`object_store_bytes` in use, `object_store_limit_bytes`, and `spilled_bytes` since the watch began, over all nodes;
        empty before the first answer and where the last was none."""
        return dict(self._latest)

    def close(self) -> None:
        """Returns at once."""
        self._stop.set()

    def _watch(self) -> None:
        num_failures = 0
        while num_failures < _MOST_FAILURES:
            try:
                self._latest = self._fields(_store_stats())
                num_failures = 0
            except Exception as error:  # Ray's own interface, which says not what it raises
                self._latest = {}
                num_failures += 1
                cause = str(error)
            if self._stop.wait(_POLL_S):
                return
        _logger.warning("the object store is not watched any more (%s)", cause)

    def _fields(self, stats: Any) -> dict[str, int]:
        if self._spilled_before is None:
            self._spilled_before = stats.spilled_bytes_total
        return {
            "object_store_bytes": stats.object_store_bytes_used,
            "object_store_limit_bytes": stats.object_store_bytes_avail,
            "spilled_bytes": stats.spilled_bytes_total - self._spilled_before,
        }


def _store_stats() -> Any:
    """Of all nodes, as `ray memory --stats-only` has them. Ray 2.60 has no public function for it."""
    from rayrec.compat.ray_compat import internal_api, state

    return internal_api.get_memory_info_reply(state.state, timeout_seconds=_TIMEOUT_S).store_stats
