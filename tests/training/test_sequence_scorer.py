"""Scores of a reward model against transformers' sequence classifier, packed over a mesh."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch_oracle import save_tiny_model
from training_cases import VOCABULARY, make_config

from jaxrl_ppo.models.config import ModelFolderError
from jaxrl_ppo.schema.config import MeshConfig, RewardModelConfig
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.packing import PackingError
from jaxrl_ppo.training.sequence_scorer import SequenceScorer


def classifier(folder, labels=1):
    """A random sequence classifier, its folder written."""
    save_tiny_model(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels = labels
    torch.manual_seed(1)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return model


def make_scorer(folder, tokens=48):
    settings = RewardModelConfig(enable=True, forward_max_token_len_per_gpu=tokens)
    return SequenceScorer(settings, make_config().actor, model_folder=folder, mesh=make_mesh(MeshConfig()))


def test_scores_equal_a_sequence_classifiers(tmp_path):
    model = classifier(tmp_path / "model")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, VOCABULARY, length).astype(np.int32) for length in (1, 7, 40, 12, 12, 3, 25)]
    with torch.no_grad():
        expected = [model(torch.tensor(tokens[None], dtype=torch.long)).logits.item() for tokens in sequences]
    assert np.std(expected) > 0.5
    scorer = make_scorer(tmp_path / "model")
    scores = scorer.scores(sequences)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(PackingError, match=r"reward\.reward_model\.forward_max_token_len_per_gpu"):
        scorer.scores([np.full(49, 5, np.int32)])


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    classifier(tmp_path / "model", labels=2)
    with pytest.raises(ModelFolderError, match=r"score\.weight has shape \[2, \d+\], expected \[1, \d+\]"):
        make_scorer(tmp_path / "model")
