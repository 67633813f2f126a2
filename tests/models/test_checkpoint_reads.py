"""What two processes read of a checkpoint that they load onto one mesh: their own shards, and no more."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from jax_processes import run_script
from safetensors import safe_open

HERE = Path(__file__).parent
VOCABULARY, WIDTH, INNER, LAYERS = 16384, 256, 64, 2
DEVICES = 4  # of each process
HUGE_PAGE = 2 << 20  # what the kernel may map at once, at either edge of what is read


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
    )
    target = tmp_path_factory.mktemp("reads") / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    return target


def load(folder, mesh):
    """(bytes taken from tensors, resident bytes of the file's mapping) of each of two processes."""
    return run_script(
        HERE / "read_script.py",
        lambda rank, coordinator: [folder, json.dumps(mesh), rank, coordinator],
        devices=DEVICES,
        processes=2,
    )


def sizes(folder):
    """Bytes of the checkpoint's matrices, and of its norms."""
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.offset_keys()]
    return tuple(sum(4 * math.prod(shape) for shape in shapes if len(shape) == rank) for rank in (2, 1))


def test_a_process_reads_the_columns_of_its_fsdp_shard(folder):
    matrices, norms = sizes(folder)
    # Every parameter has the axis that fsdp splits; the tensor axis splits further within each process alone.
    for taken, _ in load(folder, {"fsdp": 2, "tensor": DEVICES}):
        assert taken == (matrices + norms) / 2


def test_a_process_touches_the_rows_of_its_tensor_shard(folder):
    matrices, norms = sizes(folder)
    for taken, resident in load(folder, {"tensor": 2 * DEVICES}):
        assert taken == matrices / 2 + norms
        # The kernel's own account: embedding and head are most of the file, and are cut between rows.
        assert taken * 0.9 < resident < taken + 4 * HUGE_PAGE < 0.8 * matrices
