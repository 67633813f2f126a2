"""Keys of `actor_rollout_ref.model`, `.actor`, `.ref` and `critic`: what is trained and how."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_ppo.schema.keys import key, section

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "geo_mean",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
KL_TYPES = tuple(name + plus for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+"))
# Names in optax, by whether they take a weight decay that leaves norms and biases out.
OPTIMIZERS_WITH_DECAY = ("adamaxw", "adamw", "adan", "lamb", "lion")
OPTIMIZERS_WITHOUT_DECAY = (
    *("adabelief", "adafactor", "adagrad", "adam", "adamax", "amsgrad"),
    *("novograd", "radam", "rmsprop", "sgd", "yogi"),
)
CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelPathConfig:
    """`actor_rollout_ref.model`: the pretrained model and its adapter."""

    path: str | None = key(None, "Hugging Face model: a local folder, a hub id or an fsspec URL. Required.")
    tokenizer_path: str | None = key(None, "Where the tokenizer is, when not in `path`.")
    hf_config_path: str | None = key(None, "Where config.json is, when not in `path`.")
    trust_remote_code: bool = key(False, "Let the tokenizer run code that comes with it.")
    custom_chat_template: str | None = key(None, "A Jinja chat template to use in place of the tokenizer's.")
    override_config: dict[str, Any] = key({}, "Entries that replace those of config.json.")
    external_lib: str | None = key(None, "A module to import first, e.g. one that registers a tokenizer.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass to save memory.")
    use_remove_padding: bool = key(True, "Pack samples into rows without padding between them.")
    lora_rank: int = key(0, "Rank of the LoRA adapter; 0 trains all weights.", ge=0)
    lora_alpha: float = key(16, "LoRA scale: the adapter counts lora_alpha / lora_rank.", gt=0)
    target_modules: str | list[str] = key(
        "all-linear", "Which projections get an adapter: all-linear, or names such as q_proj."
    )
    exclude_modules: str | list[str] | None = key(None, "Which projections get none.")
    lora_adapter_path: str | None = key(
        None, "A PEFT adapter folder to start from; it decides rank, scale and projections."
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class PolicyLossConfig:
    """`actor.policy_loss`: which policy loss, and the settings of those that have their own."""

    loss_mode: str = key(
        "vanilla", "The policy loss, or your own as file.py:name.", choices=POLICY_LOSSES, user_code=True
    )
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of tokens whose gradient is cut.", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "clip_cov: lower bound of the covariance of tokens that may be cut.")
    clip_cov_ub: float = key(5.0, "clip_cov: upper bound of it.")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of tokens that get a KL penalty.", ge=0, le=1)
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty.", ge=0)
    dro_beta: float | None = key(None, "dro: weight of the quadratic penalty on the log-ratio.", gt=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimConfig:
    """`*.optim`: optimizer and learning-rate schedule; the schedule counts optimizer steps."""

    optimizer: str = key("AdamW", "Optimizer, by its name in optax; case does not matter.")
    lr: float = key(1e-6, "Peak learning rate.", ge=0)
    lr_warmup_steps: int = key(-1, "Warm-up in optimizer steps; -1 leaves it to lr_warmup_steps_ratio.", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all optimizer steps.", ge=0, le=1)
    total_training_steps: int = key(-1, "Length of the schedule in optimizer steps; -1: the run's.", ge=-1)
    weight_decay: float = key(0.01, "Decoupled weight decay; norms and biases get none.", ge=0)
    betas: list[float] = key([0.9, 0.999], "Adam's two decay rates.", ge=0, lt=1)
    clip_grad: float = key(1.0, "Gradients with a larger global norm are scaled down to it.", gt=0)
    min_lr_ratio: float = key(0.0, "What a decaying schedule ends at, as a share of lr.", ge=0, le=1)
    num_cycles: float = key(0.5, "Cosine cycles over the schedule; 0.5 goes down once.", gt=0)
    lr_scheduler_type: str = key(
        "constant", "Learning rate after the warm-up.", choices=("constant", "cosine", "linear")
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class FsdpConfig:
    """`*.fsdp_config`: data types, and what rests in host memory."""

    param_offload: bool = key(False, "Keep parameters in host memory while they are not in use; the critic's too.")
    optimizer_offload: bool = key(
        False, "Keep the optimizer's state in host memory between its steps; the critic's too."
    )
    model_dtype: str = key("fp32", "Data type of the master weights.", choices=("fp32", "float32", "bf16", "bfloat16"))
    dtype: str = key("bfloat16", "Data type of the computation.", choices=("bfloat16", "bf16", "float32", "fp32"))


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """`*.checkpoint`: what a checkpoint holds."""

    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "What is saved; hf_model adds a Hugging Face folder.",
        choices=CHECKPOINT_CONTENTS,
    )
    load_contents: list[str] = key(
        ["model", "optimizer", "extra"], "What is restored on resume.", choices=CHECKPOINT_CONTENTS
    )
    async_save: bool = key(True, "Write while training goes on.")


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
    """`*.mesh`: sizes of the device mesh's axes; their product is the number of devices. One axis may be -1."""

    replica: int = key(1, "Copies of the weights, each on its own devices.", ge=1, or_minus_one=True)
    fsdp: int = key(-1, "Devices that share one copy of the weights and split the batch.", ge=1, or_minus_one=True)
    sequence: int = key(1, "Devices that split each row along its tokens.", ge=1, or_minus_one=True)
    tensor: int = key(1, "Devices that split each matrix.", ge=1, or_minus_one=True)
    expert: int = key(1, "Devices that split a mixture's experts.", ge=1, or_minus_one=True)


@dataclasses.dataclass(kw_only=True, slots=True)
class ActorConfig:
    """`actor_rollout_ref.actor`: the policy's update."""

    strategy: str = key("fsdp", "verl's backend name; all mean the mesh below.", choices=("fsdp", "fsdp2", "megatron"))
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "Sequences on one device at a time.", ge=1)
    use_dynamic_bsz: bool = key(False, "Fill micro-batches by tokens (ppo_max_token_len_per_gpu).")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens on one device at a time.", ge=1)
    clip_ratio: float = key(0.2, "How far the probability ratio may move; sets the two below.", ge=0)
    clip_ratio_low: float = key(0.2, "Clip range downwards: 1 - clip_ratio_low.", ge=0)
    clip_ratio_high: float = key(0.2, "Clip range upwards: 1 + clip_ratio_high.", ge=0)
    clip_ratio_c: float = key(3.0, "Dual clip: bound on the loss of tokens with a negative advantage.", gt=1)
    tau_pos: float = key(1.0, "sapo: sharpness of the gate for positive advantages.", gt=0)
    tau_neg: float = key(1.05, "sapo: the same for negative ones.", gt=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    loss_agg_mode: str = key("token-mean", "How token losses become one number.", choices=LOSS_AGG_MODES)
    loss_scale_factor: float | None = key(
        None, "seq-mean-token-sum-norm: divisor of a sequence's sum; null: the response length.", gt=0
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = key(False, "Report the policy's entropy even without a bonus.")
    use_kl_loss: bool = key(False, "Add a KL term to the reference policy to the loss.")
    kl_loss_coef: float = key(1e-3, "Weight of that term.", ge=0)
    kl_loss_type: str = key("low_var_kl", "Its estimator; + takes k2's gradient.", choices=KL_TYPES)
    ppo_epochs: int = key(1, "Passes over a step's samples.", ge=1)
    shuffle: bool = key(False, "Shuffle a step's prompts before they are cut into mini-batches.")
    data_loader_seed: int = key(42, "Seed of that shuffle.", ge=0)
    prefix_sharing: str = key("auto", "Compute a prompt once for all its responses.", choices=("auto", "true", "false"))
    log_prob_chunk_size: int = key(512, "Tokens projected to the vocabulary at a time on one device.", ge=1)
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FsdpConfig = section(FsdpConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    mesh: MeshConfig = section(MeshConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class RefFsdpConfig:
    """`actor_rollout_ref.ref.fsdp_config`."""

    param_offload: bool = key(False, "Keep the reference policy in host memory while it is not in use.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RefConfig:
    """`actor_rollout_ref.ref`: log-probs without gradients, of the reference policy and the old policy."""

    log_prob_micro_batch_size_per_gpu: int | None = key(None, "Sequences on one device at a time.", ge=1)
    log_prob_use_dynamic_bsz: bool = key(False, "Fill micro-batches by tokens (log_prob_max_token_len_per_gpu).")
    log_prob_max_token_len_per_gpu: int = key(16384, "Tokens on one device at a time.", ge=1)
    fsdp_config: RefFsdpConfig = section(RefFsdpConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class CriticModelConfig:
    """`critic.model`."""

    path: str | None = key(None, "Model the critic starts from; null: the actor's.")


@dataclasses.dataclass(kw_only=True, slots=True)
class CriticConfig:
    """`critic`: the value model, its loss and its optimizer."""

    enable: bool | None = key(None, "Train a critic; null: when adv_estimator is gae.")
    enable_resource_pool: bool = key(False, "Give it devices of its own; else it shares the trainer's.")
    nnodes: int = key(1, "Its nodes, with enable_resource_pool.", ge=1)
    n_gpus_per_node: int = key(8, "Its devices per node, likewise.", ge=1)
    model: CriticModelConfig = section(CriticModelConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "Sequences on one device at a time.", ge=1)
    ppo_max_token_len_per_gpu: int = key(32768, "Tokens on one device at a time.", ge=1)
    ppo_epochs: int = key(1, "Passes over a step's samples.", ge=1)
    cliprange_value: float = key(0.5, "How far a value may move from its old one.", gt=0)
    loss_agg_mode: str = key("token-mean", "How token losses become one number.", choices=LOSS_AGG_MODES)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
