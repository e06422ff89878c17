"""The peer of mla_forms: the naive form in eager torch, with heads cached as `[B N S H]`, as deepseekv2-profile's CD does."""

import time

import torch


def naive_ms(config, rows: int, held: int, steps: int = 20) -> float:
    """Milliseconds of a decode step of one attention layer with its projections."""
    d, n, r, e = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    p, v, q = config.qk_nope_head_dim, config.v_head_dim, config.q_lora_rank

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-0.05, 0.05)

    q_a = random(q, d)
    q_b = random(n * (p + e), q)
    kv_a = random(r + e, d)
    kv_b = random(n * (p + v), r)
    o = random(d, n * v)
    keys, values, x = random(rows, n, held, p + e), random(rows, n, held, v), random(rows, 1, d)
    cos, sin = random(e // 2), random(e // 2)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., 0::2], y[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def norm(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(y, y.shape[-1:])

    def step() -> torch.Tensor:
        query = (norm(x @ q_a.T) @ q_b.T).view(rows, 1, n, p + e).transpose(1, 2)
        query = torch.cat([query[..., :p], rotate(query[..., p:])], -1)
        latent, k_pe = (x @ kv_a.T).split([r, e], -1)
        new = (norm(latent) @ kv_b.T).view(rows, 1, n, p + v).transpose(1, 2)
        keys[:, :, -1:] = torch.cat([new[..., :p], rotate(k_pe)[:, None].expand(-1, n, -1, -1)], -1)
        values[:, :, -1:] = new[..., p:]
        scores = (query @ keys.transpose(2, 3)) * (p + e) ** -0.5
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return (weights @ values).transpose(1, 2).reshape(rows, 1, -1) @ o.T

    with torch.no_grad():
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


if __name__ == "__main__":
    from mla_jax import Config

    for rows, held in [(1, n) for n in (4096, 16384, 65536, 131072)] + [
        (32, n) for n in (512, 2048, 8192, 32768)
    ]:
        print(rows, held, f"{naive_ms(Config.preset('v2'), rows, held):.3f} ms", flush=True)
        torch.cuda.empty_cache()
