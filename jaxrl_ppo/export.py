"""`python -m jaxrl_ppo.export RUN/global_step_N OUT`: a Hugging Face folder from a checkpoint, without Ray."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FILE_BYTES = 4 << 30  # of a safetensors file
DTYPES = ("bfloat16", "float32", "float16")


class ExportError(Exception):
    """A checkpoint that cannot be exported."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits 1 with a line that says why when there is nothing to export."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_ppo.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a committed checkpoint: RUN/global_step_N")
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--model", help="where the run's model came from; default: what RUN/config.yaml names")
    parser.add_argument("--dtype", choices=DTYPES, help="default: what the run's rollouts had, else bfloat16")
    given = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator has nothing to do here, and may be busy
    try:
        export(given.checkpoint, given.out, model=given.model, dtype=given.dtype)
    except (ExportError, ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {given.out}")


def export(checkpoint: Path, out: Path, *, model: str | None = None, dtype: str | None = None) -> None:
    """Write the policy of `checkpoint` as a Hugging Face folder, with the configuration and tokenizer of `model`.

    `model` and `dtype` default to those of the run that the checkpoint lies in. Raises ExportError for a folder that is
    no committed checkpoint of a trained model, or an `out` that exists.
    """
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    from jaxrl_ppo.data.local import copy_to_local
    from jaxrl_ppo.models.parameters import nest, parameter_specs
    from jaxrl_ppo.models.pretrained import save_pretrained
    from jaxrl_ppo.pipeline.checkpoints import MARKER
    from jaxrl_ppo.schema.config import ModelPathConfig
    from jaxrl_ppo.training.checkpoint import MODEL, StateStore
    from jaxrl_ppo.training.setup import policy_model
    from jaxrl_ppo.weights.export import export_buckets

    if not (checkpoint / MARKER).is_file():
        fault = f"is no committed checkpoint (no {MARKER} in it)" if checkpoint.exists() else "does not exist"
        run = checkpoint if any(checkpoint.glob(f"*/{MARKER}")) else checkpoint.parent
        others = sorted(marker.parent.name for marker in run.glob(f"*/{MARKER}"))
        raise ExportError(f"{checkpoint} {fault}; committed there: {', '.join(others) or 'none'}")
    if out.exists():
        raise ExportError(f"{out} exists already")
    settings = _settings_of(checkpoint.parent)
    if model is None and settings is None:
        raise ExportError(f"{checkpoint.parent} has no config.yaml, which says where the model came from: give --model")
    source = copy_to_local(model or settings["model"]["path"])
    dtype = dtype or (settings["rollout"]["dtype"] if settings else "bfloat16")
    config = policy_model(ModelPathConfig(**(settings["model"] if settings else {})), source)  # with its LoRA, if any
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape, np.float32, sharding=here)
        for name, spec in parameter_specs(config).items()
    }
    params = StateStore().restore(checkpoint / "actor", {MODEL: nest(shapes)})[MODEL]
    out.parent.mkdir(parents=True, exist_ok=True)
    save_pretrained(out, export_buckets(config, params, np.dtype(dtype), FILE_BYTES), source)


def _settings_of(run: Path) -> Any:
    """`actor_rollout_ref` of the run's configuration; None where it has none."""
    file = run / "config.yaml"
    return yaml.safe_load(file.read_text())["actor_rollout_ref"] if file.is_file() else None


if __name__ == "__main__":
    main()
