"""What a decoder is: sizes, norms, rope and special tokens, as one frozen record that every family fills."""

from __future__ import annotations

import dataclasses

# What stands on the decoder: logits of the next token, a value of every token (critic), a score of a sequence (reward
# model). The last two are one projection to a number; of a sequence's, the one at its last token counts.
HEADS = ("lm", "value", "sequence")


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, if `kind` is not "default", how it is stretched.

    `factor`, `original_max_positions`, `low_freq_factor` and `high_freq_factor` are named as in Hugging Face
    configurations; those that a kind does not use keep their defaults.
    """

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes a decoder's parameters and its forward pass."""

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
    activation: str = "silu"
    tie_embeddings: bool = False
    head: str = "lm"  # one of HEADS
    head_bias: bool = False
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
        if self.head not in HEADS:
            raise ValueError(f"head {self.head!r} is not known; use one of {', '.join(HEADS)}")

    @property
    def query_scale(self) -> float:
        """What attention logits are multiplied by."""
        return self.head_dim**-0.5
