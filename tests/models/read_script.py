"""Run as one of two processes: loads a folder onto a mesh of both processes' devices and prints what that read.

Arguments: folder, JSON mesh {axis: size}, this process's number, an address to meet at. Result: bytes taken from
tensors, and the resident size of the file's mapping in this process.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax

from jaxrl_ppo.models import huggingface
from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.schema.config import MeshConfig
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.distributed import initialize
from jaxrl_ppo.training.model_programs import parameter_shardings

folder, sizes, rank, coordinator = sys.argv[1:]
initialize(SimpleNamespace(deadlines=SimpleNamespace(start_s=60)), coordinator, 2, int(rank))
open_files = []  # kept, so that their mappings are


class CountingSlice:
    """A tensor of a file, as safetensors gives it, that counts the bytes it hands out."""

    taken = 0

    def __init__(self, part):
        self.get_shape, self.get_dtype, self._part = part.get_shape, part.get_dtype, part

    def __getitem__(self, where):
        array = self._part[where]
        CountingSlice.taken += array.nbytes
        return array


class CountingFile:
    """A safetensors file whose tensors can be had slice by slice only."""

    def __init__(self, *arguments, **options):
        self._file = safe_open(*arguments, **options)
        open_files.append(self._file)

    def keys(self):
        return self._file.keys()

    def get_slice(self, name):
        return CountingSlice(self._file.get_slice(name))


safe_open, huggingface.safe_open = huggingface.safe_open, CountingFile
mesh = make_mesh(MeshConfig(**({"fsdp": 1} | json.loads(sizes))), jax.devices())
config = load_decoder_config(folder)
params = huggingface.load_params(folder, config, shardings=parameter_shardings(config, Layout(mesh)))
jax.block_until_ready(params)
mappings = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
resident = sum(int(re.search(r"Rss: +(\d+) kB", text)[1]) << 10 for text in mappings if "model.safetensors" in text)
print("RESULT " + json.dumps([CountingSlice.taken, resident]))
