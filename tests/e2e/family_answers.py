"""Run as a program: does vLLM answer from a folder exported here as transformers does from the one it came from?

A random model of each family (those named as arguments, by default all) goes from its Hugging Face folder to the
decoder's parameters and out again, and both answer greedily. vLLM takes most of a minute to start, so it is no test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "training"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from family_models import CONFIGS, save_family  # noqa: E402

from jaxrl_ppo.models.config import load_decoder_config  # noqa: E402
from jaxrl_ppo.models.huggingface import load_params  # noqa: E402
from jaxrl_ppo.models.parameters import flatten, nest  # noqa: E402
from jaxrl_ppo.models.pretrained import save_pretrained  # noqa: E402
from jaxrl_ppo.weights.export import export_buckets  # noqa: E402

# vLLM's CPU attention takes no narrower heads.
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PROMPTS = [list(range(6, 30)), [40, 41, 42]]  # longer and shorter than the sliding window
NEW_TOKENS = 24


def answers(name: str, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Those of transformers and those of vLLM, to PROMPTS."""
    source, exported = save_family(name, folder / "source", **SIZES), folder / "exported"
    config = load_decoder_config(source)
    params = nest({path: leaf.get_value() for path, leaf in flatten(load_params(source, config))})
    save_pretrained(exported, export_buckets(config, params, np.dtype("float32"), 1 << 20), source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    expected = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
        expected.append(out[0, len(prompt) :].tolist())
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    command = [sys.executable, HERE / "answers.py", "vllm", exported]
    subprocess.run(
        [*command, folder / "prompts.json", folder / "answers.json", str(NEW_TOKENS)],
        check=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent), "JAX_PLATFORMS": "cpu"},
    )
    return expected, json.loads((folder / "answers.json").read_text())


def main(families: list[str]) -> int:
    """Prints a line for each family; returns how many differ or cannot be run."""
    wrong = 0
    for name in families:
        with tempfile.TemporaryDirectory() as folder:
            try:
                expected, found = answers(name, Path(folder))
                verdict = "as transformers" if found == expected else f"{found}, transformers {expected}"
            except subprocess.CalledProcessError:
                found, expected, verdict = [], [[]], "vLLM cannot run it here"
        wrong += found != expected
        print(f"{name}: {verdict}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(CONFIGS)))
