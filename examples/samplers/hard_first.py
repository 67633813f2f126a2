"""A curriculum: questions that the policy gets right half the time come most, those it always or never solves least.

    python -m jaxrl_ppo.main … data.sampler.class_path=examples/samplers/hard_first.py data.sampler.class_name=HardFirst

A sampler gives row numbers. `update` is called with every trained batch, so it may learn; `state_dict` is kept in every
checkpoint, so that a resumed run gives the same rows.
"""

import random


class HardFirst:
    """Draws rows by how uncertain their outcome is: weight 0.1 + 4 p (1 - p), p the running mean of the rewards."""

    def __init__(self, data_source, data_config):
        self.rows = len(data_source)
        self.success = [0.5] * self.rows
        self.given = 0
        self.random = random.Random(data_config.seed)

    def __len__(self):
        """Rows in an epoch."""
        return self.rows

    def __iter__(self):
        """The rows of an epoch, from where the state says."""
        if self.given == self.rows:
            self.given = 0
        while self.given < self.rows:
            self.given += 1
            weights = [0.1 + 4 * p * (1 - p) for p in self.success]
            yield self.random.choices(range(self.rows), weights)[0]

    def update(self, prompts, samples):
        """`samples` are those of `prompts`, each with its `ordinal` and `reward`."""
        for prompt in prompts:
            rewards = [sample.reward for sample in samples if sample.ordinal == prompt.ordinal]
            row = prompt.extra_info["index"]
            self.success[row] = 0.5 * self.success[row] + 0.5 * sum(rewards) / len(rewards)

    def state_dict(self):
        """Everything that the next rows depend on, as JSON can hold it."""
        version, numbers, gauss = self.random.getstate()
        return {"success": self.success, "given": self.given, "random": [version, list(numbers), gauss]}

    def load_state_dict(self, state):
        """Go on from a checkpoint."""
        self.success, self.given = list(state["success"]), state["given"]
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
