"""Checkpoints of zeros that take no room on the disk: a header, and a hole behind it.

    write(Config.preset("v2_lite"), folder, "Q4_K")     (or "bf16", "fp8"; a GGUF file needs the package gguf)

"Q4_K" is llama.cpp's Q4_K_M: the head and `down` of every other layer in Q6_K, and other formats for rows that no block of 256
divides."""

import dataclasses
import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base import axes
from mla_jax.base.config import Quantization
from mla_jax.weights.gguf_names import GGUF
from mla_jax.weights.hf_names import HF, LINEAR, SCALE

LETTERS, END = "abcdefghijklmnopqrstuvwxyz", 1
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
BLOCK = 128  # of FP8


def write(config: Config, folder: Path, format: str) -> Path:
    """The path that `LLM` opens."""
    if format == "Q4_K":
        return _gguf(config, folder / "model.gguf")
    quantization = Quantization() if format == "fp8" else None
    _safetensors(config, folder / "model.safetensors", format == "fp8")
    config = dataclasses.replace(config, quantization_config=quantization)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


def write_tokenizer(folder: Path, words: int) -> None:
    """A byte-level tokenizer of this many tokens: an end, all bytes, and random words of two to five letters."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    rng, bytes_of = np.random.default_rng(0), pre_tokenizers.ByteLevel.alphabet()
    vocabulary = dict.fromkeys(["<bos>", "<eos>", *sorted(bytes_of)])
    while len(vocabulary) < words:
        lengths = rng.integers(2, 6, words)
        vocabulary |= dict.fromkeys("".join(rng.choice([*LETTERS], length)) for length in lengths)
    ids = {word: number for number, word in enumerate([*vocabulary][:words])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<bos>", "<eos>"])
    model.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


def _parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by their paths."""
    mtp = config.num_nextn_predict_layers > 0
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), mtp=mtp))
    flat = nnx.to_flat_state(nnx.split(model)[1])
    return {".".join(map(str, path)): variable.shape for path, variable in flat}


def _of_folder(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of a released folder's tensors."""
    zero = np.float32(0)
    values = {path: np.broadcast_to(zero, shape) for path, shape in _parameters(config).items()}
    for name, value in HF.export(values, config):
        yield name, value.shape


def _of_gguf(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Those of a GGUF file, in numpy's order."""
    for path in _parameters(config):
        origin = GGUF.find(path, config)
        yield origin.names[0], axes.shape(config, origin.axes)


def _safetensors(config: Config, file: Path, fp8: bool) -> None:
    entries, end = {}, 0
    for name, shape in _of_folder(config):
        stored = [(name, "BF16", shape)]
        if fp8 and LINEAR.fullmatch(name):
            stored = [(name, "F8_E4M3", shape), (name + SCALE, "F32", tuple(-(-n // BLOCK) for n in shape))]
        for each, dtype, size in stored:
            start, end = end, end + BYTES[dtype] * prod(size)
            entries[each] = {"dtype": dtype, "shape": list(size), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with open(file, "wb") as written:
        written.write(len(header).to_bytes(8, "little") + header)
        written.truncate(8 + len(header) + end)


def _gguf(config: Config, file: Path) -> Path:
    import gguf

    writer, size = gguf.GGUFWriter(file, "deepseek2"), 0
    for key, value in _metadata(config).items():
        kinds = {
            float: gguf.GGUFValueType.FLOAT32,
            bool: gguf.GGUFValueType.BOOL,
            str: gguf.GGUFValueType.STRING,
        }
        writer.add_key_value(key, value, kinds.get(type(value), gguf.GGUFValueType.UINT32))
    for name, shape in _of_gguf(config):
        kind = gguf.GGMLQuantizationType[_kind(name, shape)]
        length, block = gguf.GGML_QUANT_SIZES[kind]
        taken = prod(shape) // length * block
        as_bytes = (*shape[:-1], shape[-1] // length * block) if length > 1 else shape
        dtype = np.dtype(np.uint8 if length > 1 else np.float32)
        writer.add_tensor_info(name, as_bytes, dtype, taken, raw_dtype=kind)
        size += -(-taken // writer.data_alignment) * writer.data_alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-file.stat().st_size // writer.data_alignment) * writer.data_alignment
    with open(file, "r+b") as written:
        written.truncate(start + size)
    return file


def _kind(name: str, shape: tuple[int, ...]) -> str:
    """The format of a tensor in Q4_K_M."""
    if len(shape) == 1 or "gate_inp" in name:
        return "F32"
    layer = re.search(r"blk\.(\d+)\.", name)
    is_finer = name == "output.weight" or (
        "ffn_down" in name and layer is not None and int(layer[1]) % 2 == 0
    )
    if shape[-1] % 256:
        return "Q8_0" if is_finer else "Q5_0"
    return "Q6_K" if is_finer else "Q4_K"


def _metadata(config: Config) -> dict[str, Any]:
    """The keys of llama.cpp's converter."""
    rope, key = config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    found = {
        "block_count": config.num_hidden_layers + config.num_nextn_predict_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": rope,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "leading_dense_block_count": config.first_k_dense_replace,
        "vocab_size": config.vocab_size,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rope,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": config.v_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}[config.scoring_func],
        "expert_weights_norm": config.norm_topk_prob or None,
        "nextn_predict_layers": config.num_nextn_predict_layers or None,
    }
    return {f"deepseek2.{name}": value for name, value in found.items() if value is not None}
