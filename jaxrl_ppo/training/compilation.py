"""How many programs XLA has compiled in this process, so that a run can show that it stopped compiling."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts compilations from its creation on, by JAX's own monitoring events; the disk cache's hits count too."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _EVENT:
            self.count += 1
