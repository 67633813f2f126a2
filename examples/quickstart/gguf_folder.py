"""Turns a GGUF file of a Llama model into a Hugging Face folder: weights, tokenizer, chat template and configs.

The GGUF metadata is the only source: nothing about the model is assumed beyond its architecture (`llama`) and its
tokenizer kind (byte-level BPE, `gpt2`). Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: special tokens, never produced by merging text

# Pre-tokenizers by their GGUF name: how text is cut before byte-pair merging.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}

# GGUF tensor name -> Hugging Face name; {i} is the layer.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_huggingface_folder(gguf_file: Path, folder: Path) -> None:
    """Writes `gguf_file` as a Hugging Face model folder into the existing, empty `folder`.

    Weights are dequantised in float32 and stored in bfloat16, the dtype the models are published in; its rounding
    (2^-9 relative) is far below a 4-bit quantisation step. Raises ValueError for another architecture or tokenizer.
    """
    reader = gguf.GGUFReader(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta["general.architecture"] != "llama":
        raise ValueError(f"{gguf_file}: architecture {meta['general.architecture']!r}; only 'llama' can be converted")
    config = model_config(meta, tied=all(t.name != "output.weight" for t in reader.tensors))
    save_file(weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it private
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(meta))
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(meta))


def model_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama model from GGUF metadata."""
    heads = meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.rope.dimension_count", meta["llama.embedding_length"] // heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # float32 noise off
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: which tokens end a response."""
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor dequantised, un-permuted, in bfloat16, under its Hugging Face name."""
    tensors = {}
    for tensor in reader.tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, kind = huggingface_name(tensor.name)
        if kind == "attn_q":
            value = unpermute_rotary_rows(value, config["num_attention_heads"])
        elif kind == "attn_k":
            value = unpermute_rotary_rows(value, config["num_key_value_heads"])
        tensors[name] = np.ascontiguousarray(value.astype(ml_dtypes.bfloat16))
    return tensors


def huggingface_name(name: str) -> tuple[str, str | None]:
    """(Hugging Face name, kind of layer tensor or None) of a GGUF tensor; ValueError for one a Llama does not have."""
    if name in TENSORS:
        return TENSORS[name], None
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight", parts[2]
    raise ValueError(f"tensor {name!r} is not part of a Llama model")


def unpermute_rotary_rows(value: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's reordering of the [heads * head_dim, hidden] query and key rows.

    GGUF stores the two rows that a rotary angle turns as neighbours (x0, x_half, x1, …); Hugging Face stores the
    halves of a head one after the other.
    """
    rows, columns = value.shape
    return value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes, special tokens included."""
    if meta["tokenizer.ggml.model"] != "gpt2" or meta["tokenizer.ggml.pre"] not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer {meta['tokenizer.ggml.model']!r} with pre-tokenizer {meta['tokenizer.ggml.pre']!r}; "
            f"only 'gpt2' with one of {sorted(PRE_TOKENIZERS)} can be converted"
        )
    vocabulary = {token: index for index, token in enumerate(meta["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    result.pre_tokenizer = PRE_TOKENIZERS[meta["tokenizer.ggml.pre"]]()
    result.decoder = decoders.ByteLevel()
    result.post_processor = processors.ByteLevel(trim_offsets=False)
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens(meta)])
    return result


def special_tokens(meta: dict[str, Any]) -> list[str]:
    """Tokens that are never text, in id order."""
    kinds = meta["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(meta["tokenizer.ggml.tokens"], kinds) if kind == CONTROL_TOKEN]


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json` with the special tokens and the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "chat_template": meta["tokenizer.chat_template"],
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
