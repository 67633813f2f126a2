"""The compiled programs of the critic: values, and the value loss of one micro-step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_ppo.algorithms.aggregation import weighted_sum
from jaxrl_ppo.algorithms.value_loss import value_loss
from jaxrl_ppo.sharding.layout import Layout
from jaxrl_ppo.training.model_programs import Arrays, ModelPrograms, Tree

if TYPE_CHECKING:
    from jaxrl_ppo.models.architecture import DecoderConfig
    from jaxrl_ppo.schema.config import CriticConfig


class ValuePrograms(ModelPrograms):
    """Jitted functions of the critic, a decoder with a value head. The loss takes no scalars."""

    def __init__(
        self,
        model: DecoderConfig,
        critic: CriticConfig,
        optimizer: optax.GradientTransformation,
        layout: Layout,
        *,
        dtype: Any,
        remat: str,
        attention: str,
        offload_state: bool,
    ):
        super().__init__(
            model,
            optimizer,
            critic.optim.clip_grad,
            layout,
            dtype=dtype,
            remat=remat,
            attention=attention,
            offload_state=offload_state,
        )
        self.critic = critic
        self.values = jax.jit(self._values, out_shardings=self.everywhere)

    def _values(self, params: Tree, arrays: Arrays) -> jax.Array:
        """The value before each of a micro-step's targets, float32 [G, T]."""
        decoder = self._decoder(params)
        return decoder.project_values(self._sources(decoder, arrays)[0])

    def _loss(self, params: Tree, arrays: Arrays) -> tuple[jax.Array, tuple[Arrays, jax.Array]]:
        """A micro-step's part of the mini-batch's loss; its parts of the metrics, which are sums; its values."""
        values = self._values(params, arrays)
        token_loss, per_token = value_loss(
            values, arrays["values"], arrays["returns"], arrays["mask"], self.critic.cliprange_value
        )
        sums = {name: jnp.sum(value) for name, value in per_token.items()}
        loss = sums["vf_loss"] = weighted_sum(token_loss, arrays["weights"])
        return loss, (sums, jax.lax.stop_gradient(values))
