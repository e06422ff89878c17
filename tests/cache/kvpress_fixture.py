"""The tokens that kvpress keeps of a small random Llama's prompt: makes kvpress.npz, for comparison in test_evict.py.

Made by kvpress 0.5.5, torch 2.13.0 (CPU), transformers 5.2.0, numpy 2.4.6, in an environment of their own: kvpress does not work
with the transformers of our parity tests. `pip install torch==2.13.0 kvpress==0.5.5`, then run this file.

The file holds each layer's `q [L N S D]` and `k [L K S D]` after RoPE, `v [L K S D]`, `o [L N D W]` (the output projection, one
part a head), and `<press>_<kept>` [L K S] for each press: whether a KV head keeps a token."""

from pathlib import Path

import kvpress
import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOKENS, WINDOW, KERNEL, SINKS = 48, 4, 5, 4
KEPT = (12, 24)  # of 48 tokens: ratios that a float holds exactly
CONFIG = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=256, initializer_range=0.3,
)  # fmt: skip


def presses(ratio: float) -> dict[str, kvpress.BasePress]:
    snap = {"compression_ratio": ratio, "window_size": WINDOW, "kernel_size": KERNEL}
    return {
        "snapkv": kvpress.SnapKVPress(**snap),
        "tova": kvpress.TOVAPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio),
        "observed": kvpress.ObservedAttentionPress(ratio),
        "streaming": kvpress.StreamingLLMPress(ratio, n_sink=SINKS),
        "critical": kvpress.CriticalKVPress(kvpress.SnapKVPress(**snap)),
        "ada": kvpress.AdaKVPress(kvpress.SnapKVPress(**snap)),
        "pyramid": kvpress.PyramidKVPress(**snap, beta=2),  # with 20 the last layer would have less than the window
    }


def model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG.to_dict())
    config._attn_implementation = attention
    return LlamaForCausalLM(config).eval()


def prompt() -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def layers() -> dict[str, np.ndarray]:
    """The queries, keys, values and output projections of each layer."""
    seen, whole, cache = [], model("sdpa"), DynamicCache()

    def note(module, args, kwargs):
        q = module.q_proj(kwargs["hidden_states"]).view(1, TOKENS, -1, module.head_dim).transpose(1, 2)
        seen.append(apply_rotary_pos_emb(q, q, *kwargs["position_embeddings"])[0][0])

    for layer in whole.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    whole(prompt(), past_key_values=cache)
    parts = [layer.self_attn.o_proj.weight.T.reshape(4, 8, 32) for layer in whole.model.layers]
    k, v = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
    return {name: torch.stack(of).numpy() for name, of in (("q", seen), ("k", k), ("v", v), ("o", parts))}


def kept(name: str, press: kvpress.BasePress, keys: np.ndarray) -> np.ndarray:
    """Found by the keys that are left in the cache; AdaKV leaves them all, and lists those to mask."""
    pressed, cache = model("eager" if name == "observed" else "sdpa"), DynamicCache()
    with press(pressed):
        pressed(prompt(), past_key_values=cache)
    found = np.zeros(keys.shape[:3], bool)
    for layer, module in enumerate(pressed.model.layers):
        masked = getattr(module.self_attn, "masked_key_indices", None)
        if masked is None:
            left = cache.layers[layer].keys[0].numpy()
            found[layer] = np.isclose(keys[layer][:, :, None], left[:, None], atol=1e-5).all(-1).any(-1)  # eager rounds otherwise
            assert (found[layer].sum(-1) == left.shape[1]).all()
        else:
            found[layer] = True
            found[layer][masked[1].numpy(), masked[2].numpy()] = False
    return found


@torch.no_grad()
def main() -> None:
    arrays = layers()
    for count in KEPT:
        for name, press in presses(1 - count / TOKENS).items():
            arrays[f"{name}_{count}"] = kept(name, press, arrays["k"])
    np.savez_compressed(Path(__file__).with_name("kvpress.npz"), **arrays)


if __name__ == "__main__":
    main()
