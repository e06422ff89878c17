"""Times transformers on the shape of benchmarks/engine.py: random bf16 weights, a batch at once, greedy. No JAX.

    python benchmarks/peer_transformers.py --out peer.json

The weights are drawn from the same distribution as there; they are not the same numbers. `generate` is one static batch,
`generate_batch` is transformers' continuous batching. Its cache takes keys and values to be as wide as the rotary part, and
would fail for MLA: here both are as wide as the keys. Each is run twice, and the second time counts. The result is JSON:
tokens/s of output by name, for `forward` of a prompt; what failed is NaN, and the reason is printed."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_jax.base.config import Config

REQUESTS = 64, 256, 64  # how many, tokens of their prompts, tokens of output
PROMPT = 4096  # tokens of the one that is only read
SMALLEST = 2, 16, 8


def random_model(config: Config) -> Any:
    """transformers' model of this shape."""
    import torch
    import transformers

    settings = transformers.AutoConfig.for_model(**config.to_hf())
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(float(weight.ndim == 1), 0.02)
    model.generation_config.eos_token_id = None
    return model


def static(model: Any, prompts: list[list[int]], tokens: int) -> None:
    import torch
    import transformers

    settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    batch = torch.tensor(prompts, device=model.device)
    out = model.generate(batch, attention_mask=torch.ones_like(batch), generation_config=settings)
    assert out[:, len(prompts[0]) :].cpu().shape == (len(prompts), tokens), "generate ended early"


def continuous(model: Any, prompts: list[list[int]], tokens: int) -> None:
    import transformers

    settings = transformers.GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    found = model.generate_batch(prompts, generation_config=settings, persistent_manager=True)
    assert {len(one.generated_tokens) for one in found.values()} == {tokens}, (
        "generate_batch failed, or ended early"
    )


def read(model: Any, prompts: list[list[int]], tokens: int) -> None:
    """One pass over the prompts, with the logits of their last tokens."""
    import torch

    logits = model(torch.tensor(prompts, device=model.device), logits_to_keep=1).logits
    assert logits.cpu().shape[:2] == (len(prompts), 1)


def make_continuous(model: Any) -> None:
    """Chooses attention over a paged cache as wide as the keys."""
    import torch
    import transformers
    from transformers.integrations.sdpa_paged import sdpa_attention_paged_forward

    def padded(module: Any, query: Any, key: Any, value: Any, *args: Any, **kw: Any) -> tuple:
        width = value.shape[-1]
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - width))
        out, weights = sdpa_attention_paged_forward(module, query, key, value, *args, **kw)
        return out[..., :width], weights

    transformers.AttentionInterface.register("paged|sdpa", padded)
    model.config.head_dim = model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    model.set_attn_implementation("paged|sdpa")


def rate(work: Callable[..., None], *args: Any) -> float:
    """Tokens/s of each prompt's `tokens` the second time; NaN if it fails."""
    import torch

    model, prompts, tokens = args
    seconds = float("nan")
    try:
        with torch.no_grad():
            for _ in range(2):
                start = time.perf_counter()
                work(model, prompts, tokens)
                seconds = time.perf_counter() - start
    except Exception:  # a peer that fails is a result
        traceback.print_exc()
        return float("nan")
    return len(prompts) * tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    options = parser.parse_args()

    # transformers looks for a package `kernels`, and would find the script of that name in this folder
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).parent]
    import torch
    import transformers

    count, length, tokens = SMALLEST if options.small else REQUESTS
    model = random_model(Config.preset("tiny" if options.small else "v2_lite"))
    prompts = torch.randint(0, model.config.vocab_size, (count, length)).tolist()
    long = torch.randint(0, model.config.vocab_size, (1, length if options.small else PROMPT)).tolist()
    name, rates = f"transformers {transformers.__version__}", {}
    works = (
        ("forward", read, long, len(long[0])),
        ("generate", static, prompts, tokens),
        ("generate_batch", continuous, prompts, tokens),
    )
    for method, work, given, each in works:
        if work is continuous:
            make_continuous(model)
        rates[f"{name} {method}"] = rate(work, model, given, each)
        print(f"{method}: {rates[f'{name} {method}']:.4g} tokens/s", flush=True)
        options.out.write_text(json.dumps(rates))  # now, should the next one hang
    os._exit(0)  # the persistent manager's thread would be waited for


if __name__ == "__main__":
    main()
