"""Every recipe under examples/ is a configuration that runs, given a model and data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted((REPOSITORY / "examples" / "recipes").glob("*.sh"))
QUICKSTART_SIZES = {"dapo": ["data.max_response_length=48", "reward.reward_kwargs.overlong_buffer_cfg.len=16"]}


def test_the_recipes_are_there():
    assert {recipe.stem for recipe in RECIPES} == {
        "cispo", "dapo", "dr_grpo", "gspo", "opo", "ppo", "reinforce_plus_plus", "remax", "rloo",
    }  # fmt: skip


@pytest.mark.parametrize("base", ["ppo_trainer", "quickstart"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_names_its_paper_and_lacks_nothing_but_model_and_data(recipe, base):
    assert re.search(r"20\d\d, arXiv \d{4}\.\d{5}", recipe.read_text())
    absent = [f"{key}=/no/such/place" for key in ("actor_rollout_ref.model.path", "data.train_files", "data.val_files")]
    command = ["bash", str(recipe), "--config-name", base, "trainer.dry_run=true", *absent]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        command + (QUICKSTART_SIZES.get(recipe.stem, []) if base == "quickstart" else []),
        cwd=REPOSITORY, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    faults = [line for line in result.stderr.splitlines() if line.startswith("  - ")]
    assert result.returncode == 2, result.stderr
    assert len(faults) == 3
    assert all("/no/such/place" in fault for fault in faults), faults
