"""The rules of `critic` and of the training steps that are its alone."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault

ROLLOUT = "actor_rollout_ref.rollout"


def critic(config: Config) -> Iterator[Fault]:
    """A critic where one is needed, with batches, lengths and devices that fit."""
    settings, step = config.critic, config.data.train_batch_size
    if not settings.enable:
        if config.algorithm.adv_estimator == "gae":
            yield Fault(
                ("critic.enable", "algorithm.adv_estimator"),
                "critic.enable=false: algorithm.adv_estimator=gae needs a critic.",
            )
        if config.trainer.critic_warmup:
            text = f"trainer.critic_warmup={config.trainer.critic_warmup} needs a critic (critic.enable)"
            yield Fault(("trainer.critic_warmup", "critic.enable"), f"{text}.")
        return
    mini = settings.ppo_mini_batch_size
    keys: tuple[str, ...] = ("critic.ppo_mini_batch_size", "data.train_batch_size")
    if mini > step or step % mini:
        yield Fault(keys, f"{keys[1]}={step} does not divide by {keys[0]}={mini}.")
    tokens, data = sizes.critic_tokens(config), config.data
    longest = data.max_prompt_length + data.max_response_length
    if tokens is not None and longest > tokens:
        keys = ("critic.ppo_max_token_len_per_gpu", "data.max_prompt_length", "data.max_response_length")
        text = f"data.max_prompt_length={data.max_prompt_length} + max_response_length={data.max_response_length}"
        yield Fault(keys, f"{keys[0]}={tokens} holds less than one longest sample: {text} = {longest}.")
    devices = sizes.critic_devices(config) or sizes.trainer_devices(config)
    pool = ("critic.nnodes", "critic.n_gpus_per_node")
    shape = sizes.mesh_on(config, devices)
    if shape is None:
        if sizes.critic_devices(config):
            text = f"actor_rollout_ref.actor.mesh does not multiply to the {devices} devices of the critic's pool"
            yield Fault(pool, f"{text} ({pool[0]} x {pool[1]}); give its axis fsdp as -1.")
    elif mini * config.actor_rollout_ref.rollout.n % (groups := shape["replica"] * shape["fsdp"] * shape["expert"]):
        sequences = mini * config.actor_rollout_ref.rollout.n
        text = f"= {sequences} sequences do not divide over {groups} data-parallel devices"
        keys = ("critic.ppo_mini_batch_size", f"{ROLLOUT}.n", *pool)
        yield Fault(keys, f"{keys[0]}={mini} x {keys[1]} {text}.")
    unsaved = [part for part in settings.checkpoint.load_contents if part not in settings.checkpoint.save_contents]
    if unsaved:
        keys = ("critic.checkpoint.load_contents", "critic.checkpoint.save_contents")
        yield Fault(keys, f"{keys[0]} asks for {', '.join(unsaved)}, which {keys[1]} does not save.")
    kept, kept_critic = config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep
    if kept is not None and kept_critic is not None and kept_critic > kept:
        keys = ("trainer.max_critic_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep")
        text = "a critic lies in the checkpoint of its actor"
        yield Fault(keys, f"{keys[0]}={kept_critic} is more than {keys[1]}={kept}: {text}.")
