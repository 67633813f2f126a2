"""The plan's command: python -m jaxrl_ppo.plan [--config-name NAME] plan.topology=v5e:8x8 [key=value ...]."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from jaxrl_ppo.plan.topology import KEY, Topology, TopologyError, parse

DOES_NOT_FIT, BAD_CONFIGURATION = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan; returns 0 when every program fits, 1 when one does not, 2 for a configuration that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_ppo.plan",
        description="Compiles a run's programs for a topology that need not be here, and prints what they take.",
        epilog=f"{KEY} is a TPU slice (v5e:8x8, v5p:4x4x4, v6e:16x16) or cpu:N; the model's folder needs only its "
        "config.json, and no data is read.",
    )
    parser.add_argument("--config-name", default="ppo_trainer", help="as for jaxrl_ppo.main")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for jaxrl_ppo.main")
    options = parser.parse_intermixed_args(arguments)
    try:
        topology, overrides = _topology(options.overrides)
    except TopologyError as error:
        print(error, file=sys.stderr)
        return BAD_CONFIGURATION
    os.environ.update(topology.environment())  # before anything imports jax
    from jaxrl_ppo.plan.run import PlanError, plan

    try:
        return 0 if plan(options.config_name, overrides, topology) else DOES_NOT_FIT
    except (PlanError, TopologyError) as error:
        print(error, file=sys.stderr)
        return BAD_CONFIGURATION


def _topology(overrides: Sequence[str]) -> tuple[Topology, list[str]]:
    """The topology that the overrides name, and the others."""
    own = [text for text in overrides if text.lstrip("+").startswith(f"{KEY}=")]
    if len(own) != 1:
        raise TopologyError(f"{KEY} must be given once, e.g. {KEY}=v5e:8x8")
    return parse(own[0].partition("=")[2]), [text for text in overrides if text not in own]


if __name__ == "__main__":
    sys.exit(main())
