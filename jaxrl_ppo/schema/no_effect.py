"""Keys that are accepted and change nothing here, and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection
from typing import Any

from jaxrl_ppo.schema import sizes
from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.legacy import leaves, remove
from jaxrl_ppo.schema.rules_reward_model import judge_served

# Keys of verl that have no counterpart. A pattern also covers everything below it; * stands for any characters.
FOREIGN = {
    "*._target_": "classes are fixed",
    "actor_rollout_ref.nccl_timeout": "there is no NCCL group between trainer and rollout",
    "actor_rollout_ref.*.use_torch_compile": "XLA compiles everything",
    "actor_rollout_ref.*.profiler": "timeline.json is always written",
    "actor_rollout_ref.*.rollout_n": "rollout.n is the only count",
    "actor_rollout_ref.*.entropy_from_logits_with_chunking": "logits are always chunked",
    "actor_rollout_ref.*.entropy_checkpointing": "logits are never kept",
    "actor_rollout_ref.model.use_shm": "weights are read in place",
    "actor_rollout_ref.model.use_liger": "torch kernels",
    "actor_rollout_ref.model.use_fused_kernels": "torch kernels",
    "actor_rollout_ref.model.fused_kernel_options": "torch kernels",
    "actor_rollout_ref.model.enable_activation_offload": "activations are recomputed",
    "actor_rollout_ref.model.tiled_mlp": "activations are recomputed",
    "actor_rollout_ref.model.torch_dtype": "actor.fsdp_config.model_dtype decides",
    "actor_rollout_ref.actor.use_prefix_grouper": "actor.prefix_sharing decides",
    "actor_rollout_ref.actor.freeze_vision_tower": "text models only",
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "computed where the estimator needs it",
    "actor_rollout_ref.actor.sum_pi_squared_checkpointing": "logits are never kept",
    "actor_rollout_ref.actor.use_remove_padding": "model.use_remove_padding decides",
    "*.optim.optimizer_impl": "the optimizer is optax's",
    "*.optim.override_optimizer_config": "the optimizer is optax's",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "ppo_micro_batch_size_per_gpu decides",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": "log_prob_micro_batch_size_per_gpu decides",
    "critic.ppo_micro_batch_size": "ppo_micro_batch_size_per_gpu decides",
    "actor_rollout_ref.model.lora": "lora_rank, lora_alpha and target_modules decide",
    "actor_rollout_ref.actor.megatron": "the mesh decides",
    "actor_rollout_ref.*.fsdp_config.wrap_policy": "the mesh decides",
    "actor_rollout_ref.*.fsdp_config.forward_prefetch": "XLA schedules",
    "actor_rollout_ref.*.fsdp_config.reshard_after_forward": "XLA schedules",
    "actor_rollout_ref.*.fsdp_config.offload_policy": "param_offload decides",
    "actor_rollout_ref.*.fsdp_config.use_orig_params": "FSDP of torch",
    "actor_rollout_ref.*.fsdp_config.mixed_precision": "fsdp_config.dtype decides",
    "actor_rollout_ref.*.fsdp_config.full_determinism": "XLA is deterministic on CPU and TPU",
    "actor_rollout_ref.*.fsdp_config.forward_only": "known from the role",
    "actor_rollout_ref.*.fsdp_config.strategy": "the mesh decides",
    "actor_rollout_ref.*.fsdp_config.seed": "the run's seeds decide",
    "actor_rollout_ref.ref.fsdp_config.fsdp_size": "the actor's mesh serves both",
    "actor_rollout_ref.ref.fsdp_config.model_dtype": "the actor's decides",
    "actor_rollout_ref.ref.fsdp_config.dtype": "the actor's decides",
    "actor_rollout_ref.ref.fsdp_config.optimizer_offload": "a reference policy has no optimizer",
    "actor_rollout_ref.ref.strategy": "the actor's mesh serves both",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "the actor's mesh serves both",
    "actor_rollout_ref.ref.use_remove_padding": "model.use_remove_padding decides",
    "actor_rollout_ref.ref.megatron": "the actor's mesh serves both",
    "actor_rollout_ref.rollout.mode": "engines are always asynchronous",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "an engine's cache always comes back after its weights",
    "actor_rollout_ref.rollout.layered_summon": "weights always travel in buckets",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": "engine_kwargs.vllm takes it",
    "actor_rollout_ref.rollout.scheduling_policy": "engine_kwargs.vllm takes it",
    "actor_rollout_ref.rollout.disable_log_stats": "engine_kwargs.vllm takes it",
    "actor_rollout_ref.rollout.skip_tokenizer_init": "engines never see text",
    "actor_rollout_ref.rollout.skip_dump_dir": "rollouts are never skipped",
    "actor_rollout_ref.rollout.log_prob_*": "actor_rollout_ref.ref.log_prob_* decides",
    "actor_rollout_ref.rollout.engine_kwargs.sglang": "the engine is vllm or jax",
    "actor_rollout_ref.rollout.engine_kwargs.trtllm": "the engine is vllm or jax",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "weights go through the node-local store",
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs": "weights go through the node-local store",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "tokens are never encoded twice",
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": "tokens are never encoded twice",
    "actor_rollout_ref.rollout.trace": "samples/ is always written",
    "actor_rollout_ref.rollout.prometheus": "metrics.jsonl is always written",
    "actor_rollout_ref.rollout.mtp": "actor_rollout_ref.model.mtp decides",
    "critic.strategy": "the actor's mesh serves both",
    "critic.rollout_n": "rollout.n is the only count",
    "critic.profiler": "timeline.json is always written",
    "critic.shuffle": "the actor's decides",
    "critic.data_loader_seed": "the actor's decides",
    "critic.use_dynamic_bsz": "the actor's decides",
    "critic.forward_*": "values take critic.ppo_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size": "the actor's mesh serves both",
    "critic.megatron": "the actor's mesh serves both",
    "critic.model.*": "the actor's model settings serve both",
    "data.tokenizer": "actor_rollout_ref.model.tokenizer_path decides",
    "data.use_shm": "files are read in place",
    "data.return_*": "every row keeps its messages",
    "data.tool_config_path": "rollout.multi_turn.tool_config_path decides",
    "data.image_*": "text models only",
    "data.video_*": "text models only",
    "reward_model.model.input_tokenizer": "responses are put into the reward model's own template where it has another",
    "reward_model": "the rest of verl's old reward-model section; reward.reward_model decides",
    **dict.fromkeys(
        [f"reward.reward_model.rollout.{name}" for name in ("temperature", "top_*", "do_sample", "n", "ignore_eos")],
        "the requests of the reward function decide",
    ),
    **dict.fromkeys(
        [
            f"reward.reward_model.rollout.{name}"
            for name in (
                "cudagraph_*",
                "scheduling_policy",
                "quantization*",
                "disable_log_stats",
                "seed",
                "load_format",
            )
        ],
        "engine_kwargs.vllm takes it",
    ),
    **dict.fromkeys(
        [f"reward.reward_model.rollout.{name}" for name in ("free_cache_engine", "multi_stage_wake_up")],
        "a judge has devices of its own, and never sleeps",
    ),
    "reward.reward_model.rollout.skip_tokenizer_init": "a judge reads text",
    "reward.reward_model.rollout.limit_images": "text models only",
    "reward.reward_model.rollout.layered_summon": "a judge's weights do not change",
    "reward.reward_model.rollout.engine_kwargs.sglang": "the engine is vllm",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.esi_redundant_time": "the run saves when it is told to stop",
    "trainer.default_hdfs_dir": "trainer.default_local_dir decides",
    "trainer.del_local_ckpt_after_load": "trainer.max_actor_ckpt_to_keep decides",
    "trainer.ray_wait_register_center_timeout": "there is no register centre",
    "global_profiler": "timeline.json is always written",
    "transfer_queue": "long batches travel as Ray objects",
}


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"
OWN_AGGREGATION = ("gspo", "sapo", "geo_mean")


def _jax_engine(config: Config) -> bool:
    return config.actor_rollout_ref.rollout.name == "jax"


def _no_tools(config: Config) -> bool:
    return not config.actor_rollout_ref.rollout.multi_turn.enable


def _apart(config: Config) -> bool:
    return not sizes.takes_turns(config)


def _no_reward_model(config: Config) -> bool:
    return not config.reward.reward_model.enable


def _no_classifier(config: Config) -> bool:
    return _no_reward_model(config) or judge_served(config)


def _no_reward_pool(config: Config) -> bool:
    return not sizes.reward_model_devices(config)


def _not_async(config: Config) -> bool:
    return config.trainer.mode != "async"


# Keys of the schema that do nothing under some settings: key → (when, why).
CONDITIONAL: dict[str, tuple[Callable[[Config], bool], str]] = {
    f"{ACTOR}.strategy": (lambda _: True, "every strategy means the mesh"),
    f"{ACTOR}.loss_agg_mode": (
        lambda config: config.actor_rollout_ref.actor.policy_loss.loss_mode in OWN_AGGREGATION,
        "the policy loss is a seq-mean-token-mean",
    ),
    "actor_rollout_ref.model.use_remove_padding": (
        lambda config: not config.actor_rollout_ref.model.use_remove_padding,
        "samples are always packed",
    ),
    f"{ROLLOUT}.calculate_log_probs": (
        lambda config: not config.actor_rollout_ref.rollout.calculate_log_probs,
        "engines always give log-probs",
    ),
    "data.gen_batch_size": (
        lambda config: (
            not config.algorithm.filter_groups.enable and config.data.gen_batch_size != config.data.train_batch_size
        ),
        "without algorithm.filter_groups.enable a step generates what it trains",
    ),
    "algorithm.filter_groups.metric": (
        lambda config: not config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric is not None,
        "algorithm.filter_groups.enable=false",
    ),
    "algorithm.filter_groups.max_num_gen_batches": (
        lambda config: (
            not config.algorithm.filter_groups.enable and config.algorithm.filter_groups.max_num_gen_batches > 0
        ),
        "algorithm.filter_groups.enable=false",
    ),
    "algorithm.pf_ppo.reweight_method": (
        lambda config: not config.algorithm.use_pf_ppo and config.algorithm.pf_ppo.reweight_method != "pow",
        "algorithm.use_pf_ppo=false",
    ),
    "algorithm.pf_ppo.weight_pow": (
        lambda config: (
            (not config.algorithm.use_pf_ppo and config.algorithm.pf_ppo.weight_pow != 2.0)
            or (config.algorithm.use_pf_ppo and config.algorithm.pf_ppo.reweight_method != "pow")
        ),
        "only algorithm.pf_ppo.reweight_method=pow has an exponent",
    ),
    "data.val_batch_size": (
        lambda config: config.data.val_batch_size is not None,
        "validation prompts go to the engines all at once",
    ),
    f"{REWARD_MODEL}.model_path": (_no_reward_model, f"{REWARD_MODEL}.enable=false"),
    **{
        f"{REWARD_MODEL}.{name}": (_no_classifier, f"{REWARD_MODEL}.enable=false, or it is a judge")
        for name in ("weight", "forward_max_token_len_per_gpu")
    },
    **{
        f"{REWARD_MODEL}.{name}": (_no_reward_pool, f"{REWARD_MODEL}.enable_resource_pool=false")
        for name in ("nnodes", "n_gpus_per_node")
    },
    "trainer.balance_batch": (lambda config: not config.trainer.balance_batch, "rows are always balanced"),
    "async_training.max_staleness": (_not_async, "only trainer.mode=async runs ahead"),
    "async_training.trigger_parameter_sync_step": (_not_async, "only trainer.mode=async runs ahead"),
    "async_training.partial_rollout": (_not_async, "only trainer.mode=async runs ahead"),
    "actor_rollout_ref.hybrid_engine": (
        lambda config: config.actor_rollout_ref.hybrid_engine and _apart(config),
        "the rollout's devices are of another kind than the trainer's",
    ),
    f"{ROLLOUT}.free_cache_engine": (_apart, "trainer and rollout have devices of their own"),
    f"{ROLLOUT}.node_resource": (
        lambda config: config.actor_rollout_ref.rollout.node_resource is not None and sizes.takes_turns(config),
        "the rollout is where the trainer is",
    ),
    f"{ROLLOUT}.enforce_eager": (_jax_engine, "the jax engine has no such setting"),
    f"{ROLLOUT}.enable_chunked_prefill": (_jax_engine, "the jax engine has no such setting"),
    f"{ROLLOUT}.engine_kwargs.vllm": (_jax_engine, "the jax engine has no such setting"),
    f"{ROLLOUT}.multi_turn.tool_config_path": (_no_tools, "multi_turn.enable is off"),
    f"{ROLLOUT}.multi_turn.format": (_no_tools, "multi_turn.enable is off"),
}


def drop_foreign(raw: dict[str, Any]) -> list[str]:
    """Remove the keys of FOREIGN from `raw`, in place; returns 'key (why)' of each."""
    schema = {path for path, _, _ in walk()}
    dropped = []
    for path, value in list(leaves(raw, "")):
        reason = None if path in schema else _reason(path)
        if reason is not None:
            remove(raw, path)
            if value is not None and not path.endswith("._target_"):
                dropped.append(f"{path} ({reason})")
    return dropped


JUDGE = f"{REWARD_MODEL}.rollout."


def without_effect(config: Config, changed: Collection[str], given: Collection[str]) -> list[str]:
    """Of the keys that the user `changed`, those that do nothing in this configuration, as 'key (why)'.

    `given` are those on the command line: others of a section may differ from their defaults by interpolation alone.
    """
    idle = [f"{path} ({why})" for path, (when, why) in CONDITIONAL.items() if path in changed and when(config)]
    if not judge_served(config):
        why = "no reward function asks a judge: a reward model is a classifier then, run in JAX"
        idle += [f"{path} ({why})" for path in changed if path.startswith(JUDGE)]
    of_critic = [path for path in given if path.startswith("critic.") and path != "critic.enable"]
    if config.critic.enable and not config.critic.enable_resource_pool:
        own_pool = ("critic.nnodes", "critic.n_gpus_per_node")
        return idle + [f"{path} (critic.enable_resource_pool=false)" for path in of_critic if path in own_pool]
    if config.critic.enable:
        return idle
    of_critic += [path for path in given if path == "trainer.max_critic_ckpt_to_keep"]
    return idle + [f"{path} (no critic is trained)" for path in of_critic]


def _reason(path: str) -> str | None:
    parts = path.split(".")
    for depth in range(len(parts), 0, -1):
        above = ".".join(parts[:depth])
        for pattern, reason in FOREIGN.items():
            if fnmatch.fnmatchcase(above, pattern):
                return reason
    return None
