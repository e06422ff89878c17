"""The outputs of transformers for a folder: the other side of every comparison."""

import itertools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from parity.pangu import PanguForCausalLM
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CLASSES = {
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "kimi_k2": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "axk1": (transformers.AXK1Config, transformers.AXK1ForCausalLM),
    "longcat_flash": (transformers.LongcatFlashConfig, transformers.LongcatFlashForCausalLM),
    "minicpm3": (transformers.MiniCPM3Config, transformers.MiniCPM3ForCausalLM),
    "mistral4": (transformers.Mistral4Config, transformers.Mistral4ForCausalLM),
    "pangu_ultra_moe": (transformers.DeepseekV3Config, PanguForCausalLM),
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
    "youtu": (transformers.YoutuConfig, transformers.YoutuForCausalLM),
}


def load(folder: Path):
    """The folder as a transformers model in float32."""
    hf = json.loads((folder / "config.json").read_text())
    if hf["model_type"] == "longcat_flash":
        folder = _with_empty_experts(folder, hf)
    config_class, model_class = CLASSES[hf.pop("model_type")]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return model_class.from_pretrained(folder, config=config_class(**hf), dtype=torch.float32, **plain).eval()


def _with_empty_experts(folder: Path, hf: dict) -> Path:
    """The folder with gates for the experts without weights, too, which the class has room for and never reads."""
    tensors = load_file(folder / "model.safetensors")
    for layer, expert in itertools.product(range(hf["num_layers"]), range(hf["n_routed_experts"], _experts(hf))):
        for part in ("gate_proj", "up_proj"):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            tensors[name] = torch.zeros_like(tensors[name.replace(f"experts.{expert}.", "experts.0.")])
    padded = shutil.copytree(folder, Path(tempfile.mkdtemp()), dirs_exist_ok=True)
    save_file(tensors, padded / "model.safetensors", metadata={"format": "pt"})
    return padded


def _experts(hf: dict) -> int:
    return hf["n_routed_experts"] + hf["zero_expert_num"]


@torch.no_grad()
def logits(model, tokens: np.ndarray) -> np.ndarray:
    return model(torch.tensor(tokens)).logits.numpy()


@torch.no_grad()
def inside(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states `[L + 1 B T D]`, the last one normed, and weights of attention `[L B N T S]`."""
    found = model(torch.tensor(tokens), output_hidden_states=True, output_attentions=True)
    return torch.stack(found.hidden_states).numpy(), torch.stack(found.attentions).numpy()


@torch.no_grad()
def greedy(model, prompt: list[int], steps: int) -> list[int]:
    """`steps` tokens, end tokens treated as any other."""
    model.generation_config.eos_token_id = None
    settings = transformers.GenerationConfig(max_new_tokens=steps, do_sample=False, pad_token_id=0)
    tokens = torch.tensor([prompt])
    everything = torch.ones_like(tokens)  # or it takes a BOS of id 0 for padding
    return model.generate(tokens, attention_mask=everything, generation_config=settings)[0, len(prompt) :].tolist()


@torch.no_grad()
def in_chunks(model, prompt: list[int], chunk: int, steps: int) -> tuple[np.ndarray, list[int]]:
    """The logits of a prompt that is read `chunk` tokens at a time, and `steps` greedy tokens behind it."""
    cache, found, chosen = transformers.DynamicCache(config=model.config), [], []
    for first in range(0, len(prompt), chunk):
        tokens = torch.tensor([prompt[first : first + chunk]])
        found.append(model(tokens, past_key_values=cache, use_cache=True).logits[0].numpy())
    last = found[-1][-1]
    for _ in range(steps):
        chosen.append(int(last.argmax()))
        last = model(torch.tensor([chosen[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1].numpy()
    return np.concatenate(found), chosen


@torch.no_grad()
def mtp_logits(model, tokens: np.ndarray) -> np.ndarray:
    """The first MTP layer's logits for token t + 2 at every t, given the true token t + 1."""
    if not hasattr(model.config, "num_mtp_layers"):  # some have an MTP layer that their class does not know of
        model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
        model.config.mtp_layer_types = [*(getattr(model.config, "layer_types", None) or [])[-1:]]
    # where it looks for the MTP weights: the class names the released model's layer number only
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]
    mtp = MtpModel.from_pretrained(model).to(torch.float32)
    mtp.set_attn_implementation("eager")
    hidden, following = model.model(torch.tensor(tokens[:, :-1])).last_hidden_state, torch.tensor(tokens[:, 1:])
    positions = torch.arange(1, tokens.shape[1]).expand(tokens.shape[0], -1)
    if hasattr(model.config, "index_topk"):
        return mtp._project_to_logits(_indexed_mtp(mtp, hidden, following, positions)).numpy()
    cache = transformers.cache_utils.MtpCache(config=model.config.get_mtp_config())
    out = mtp.forward_layer(0, hidden, positions, cache, input_ids=following)
    return mtp._project_to_logits(out).numpy()


def _indexed_mtp(mtp, hidden: torch.Tensor, following: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The first MTP layer around a block with an indexer, for which MtpModel makes no mask: its parts, one after the other."""
    layer, tokens = mtp.layers[0], following.shape[1]
    joined = torch.cat([layer.enorm(mtp.embed_tokens(following)), layer.hnorm(hidden)], dim=-1)
    mask = torch.full((1, 1, tokens, tokens), -torch.inf).triu(1)
    turns = mtp.rotary_emb(hidden, position_ids=positions)
    found = layer.mtp_block(layer.eh_proj(joined), attention_mask=mask, position_embeddings=turns, position_ids=positions)
    return layer.post_norm(found[0] if isinstance(found, tuple) else found)
