"""What vLLM's worker processes do for us: load a weight version from the node's store, and not outlive the run.

vLLM mixes `StoreReceiver` into its worker class (`worker_extension_cls`), so its names must not be taken there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

from jaxrl_ppo.weights import vllm_owner
from jaxrl_ppo.weights.manifest import WeightManifest
from jaxrl_ppo.weights.reader import read_tensors


class StoreReceiver:
    """Mixed into a vLLM worker; `self` is that worker."""

    def jaxrl_load_weights(self, folder: str) -> str | None:
        """Load the version in `folder` into this worker's shard of the model; None, or what went wrong.

        The engine's process has verified names, shapes and checksums. Errors are returned, since vLLM would hand on
        their text only. After one, the model is a mixture of two versions; a further load can mend it.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        try:
            tensors = _torch_tensors(WeightManifest.read(folder))
            self.reload_weights(weights_iterator=tensors)  # type: ignore[attr-defined]
            _process_tied_modules(model)
        except Exception as error:
            _abandon_load(model, self.model_config)  # type: ignore[attr-defined]
            return f"{type(error).__name__}: {error}"
        return None


def _torch_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in read_tensors(manifest, verify=False):
        # torch knows neither numpy's bfloat16 nor a way to take a 2-byte array as one, except through int16.
        bits = array.view("int16") if array.dtype.itemsize == 2 else array
        tensor = torch.from_numpy(bits)
        yield name, tensor.view(torch.bfloat16) if bits is not array else tensor


def _process_tied_modules(model: torch.nn.Module) -> None:
    """Repeat the processing of modules that share a parameter with another one.

    vLLM's reload processes the module that a tensor is loaded into, and only that. On CPU an output projection tied to
    the embeddings has a repacked copy of them, which would stay the old one, without a word. Where nothing is repacked
    this does nothing.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        if len(modules) > 1:
            for module in modules:
                quant_method: Any = module.quant_method
                quant_method.process_weights_after_loading(module)


def _abandon_load(model: torch.nn.Module, model_config: Any) -> None:
    """Forget a reload that failed halfway: what it had buffered would make the next one fail too."""
    for module in model.modules():
        info = get_layerwise_info(module)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


# vLLM gives an extension no hook at start-up; importing this module in a worker is that hook.
vllm_owner.watch()
