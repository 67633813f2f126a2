"""What a decoder is: sizes, norms, rope and special tokens, as one frozen record that every family fills."""

from __future__ import annotations

import dataclasses

# What stands on the decoder: logits of the next token, a value of every token (critic), a score of a sequence (reward
# model). The last two are one projection to a number; of a sequence's, the one at its last token counts.
HEADS = ("lm", "value", "sequence")


ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, if `kind` is not "default", how it is stretched.

    `factor` and what follows are named as in Hugging Face configurations; those that a kind does not use keep their
    defaults. `attention_factor` multiplies cos and sin. "dynamic" stretches the base with a sequence's length beyond
    the model's `max_positions`, and does nothing up to there.
    """

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs between a model's layers: how many positions back a token sees, itself included, and the rope."""

    window: int | None
    rope: RopeConfig


@dataclasses.dataclass(frozen=True, slots=True)
class LoraConfig:
    """A low-rank adapter: alpha / rank times a product of two matrices is added to each kernel of `targets`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes a decoder's parameters and its forward pass.

    `window` is that of the layers that `sliding` names, by default all; `local_rope` is theirs where it is another.
    `norm_plus_one`: norms multiply by 1 + their scale. `post_norms`: what a block gives is normed before it is added.
    `attention_softcap` and `logit_softcap` bound scores and logits (cap * tanh(x / cap)). With `num_experts`, each
    token's feed-forward is a weighted sum of `experts_per_token` experts of `intermediate_size`; the training loss then
    takes `balance_coef` times the load-balance loss.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    activation: str = "silu"  # one of ACTIVATIONS
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_plus_one: bool = False
    post_norms: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    normalise_experts: bool = True  # the weights of a token's experts add up to 1
    balance_coef: float = 0.0
    tie_embeddings: bool = False
    head: str = "lm"  # one of HEADS
    head_bias: bool = False
    lora: LoraConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when the sizes do not fit together."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings need pairs")
        if self.sliding and len(self.sliding) != self.num_layers:
            raise ValueError(f"layer types of {len(self.sliding)} layers for {self.num_layers} layers")
        if self.head not in HEADS:
            raise ValueError(f"head {self.head!r} is not known; use one of {', '.join(HEADS)}")

    @property
    def query_scale(self) -> float:
        """What attention logits are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def adapter_scale(self) -> float:
        """What a LoRA adapter's product is multiplied by; 0 without one."""
        return self.lora.alpha / self.lora.rank if self.lora else 0.0

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers over one period: layer i is of kind `kinds[i % len(kinds)]`."""
        sliding = self.sliding or (self.window is not None,) * self.num_layers
        repeats = (p for p in range(1, len(sliding) + 1) if all(s == sliding[i % p] for i, s in enumerate(sliding)))
        local = LayerKind(self.window, self.local_rope or self.rope)
        return tuple(local if s else LayerKind(None, self.rope) for s in sliding[: next(repeats)])
