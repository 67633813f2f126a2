"""The reward model on a mesh: one score for each token sequence, many sequences in a program call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.kernels import check_kernel
from jaxrl_ppo.schema.records import Batch, Prompt
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.training.head import gather_sources
from jaxrl_ppo.training.model_programs import ROWS, Arrays, parameter_shardings
from jaxrl_ppo.training.packing import MicroStep, pack
from jaxrl_ppo.training.setup import DTYPES, attention_kernel, reward_model_limits

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import ActorConfig, RewardModelConfig


class SequenceScorer:
    """A decoder with a sequence-score head, without gradients. Every process calls it alike, with equal inputs.

    Parameters are kept in the data type that the actor computes in; attention and packing are the actor's.
    """

    def __init__(self, settings: RewardModelConfig, actor: ActorConfig, *, model_folder: str | Path, mesh: Mesh):
        """Load the sequence classifier of `model_folder` onto `mesh`.

        Raises ModelFolderError when it has another number of labels than one, ShardingError, and KernelError when the
        attention kernel is wrong on this machine.
        """
        self.model = load_decoder_config(model_folder, "sequence")
        self.layout = layout = Layout(mesh)
        dtype, attention = DTYPES[actor.fsdp_config.dtype], attention_kernel(actor, self.model, mesh)
        if attention != "xla":
            check_kernel(attention, self.model, dtype)
        self._limits = reward_model_limits(settings, actor, self.model, layout)

        def decoder() -> Decoder:
            return Decoder(self.model, rngs=nnx.Rngs(0), dtype=dtype, attention=attention, layout=layout)

        self._graph = nnx.graphdef(nnx.eval_shape(decoder))
        shardings = parameter_shardings(self.model, layout)
        self._params = load_params(model_folder, self.model, shardings=shardings, dtype=dtype)
        self._scores = jax.jit(self._score, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def scores(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """The number of the head at each sequence's last token, float32 [N]; sequences are int32, not empty.

        Raises PackingError when a sequence exceeds reward.reward_model.forward_max_token_len_per_gpu.
        """
        packing = pack(_as_batch(sequences), range(len(sequences)), self._limits)
        out = np.zeros((len(sequences), 1), np.float32)
        results = [self._scores(self._params, self._place(step)) for step in packing.steps]
        for step, result in zip(packing.steps, results):
            step.put(np.asarray(result), out)
        return out[:, 0]

    def _place(self, step: MicroStep) -> Arrays:
        arrays = {name: getattr(step, name) for name in (*ROWS, "source") if getattr(step, name) is not None}
        sharding = self.layout.sharding(("rows", "length"))
        return {
            name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            for name, array in arrays.items()
        }

    def _score(self, params: nnx.State, arrays: Arrays) -> jax.Array:
        """The head's number at each of a micro-step's sources, float32 [G, T]."""
        decoder = nnx.merge(self._graph, params)
        hidden = decoder.hidden(*(arrays.get(name) for name in ROWS))
        constrain = self.layout.constrain
        sources = gather_sources(constrain(hidden, "rows", None, "features"), arrays["source"])
        return decoder.project_values(constrain(sources, "rows", "length", "features"))


def _as_batch(sequences: Sequence[np.ndarray]) -> Batch:
    """Each sequence as a prompt with one response token, before which the packing has a target; that is never fed."""
    count = len(sequences)
    zeros = np.zeros((count, 1), np.float32)
    return Batch(
        prompts=[Prompt(i, tuple(tokens.tolist()), [], "", None, {}) for i, tokens in enumerate(sequences)],
        group=np.arange(count, dtype=np.int32),
        response_ids=np.zeros((count, 1), np.int32),
        response_mask=np.ones((count, 1), np.float32),
        rollout_log_probs=zeros,
        versions=np.zeros((count, 1), np.int32),
        scores=zeros[:, 0],
    )
