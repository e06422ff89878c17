"""A few rows times packed weights: dequantised into a matmul, or fused with sums of products; bfloat16 weights to compare.

    python benchmarks/packed.py --out packed.json

Calls rotate over weights that exceed a GPU's caches. `ops.linear` uses the faster way."""

from functools import partial

import jax
import jax.numpy as jnp
import report

from mla_jax.base.qtensor import QTensor, abstract, dequantize

FORMATS = ("bfloat16", "fp8_block", "int8", "int4_g32", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "Q2_K", "IQ2_XXS")
OUT, IN, LAYERS = 8192, 4096, 24


def weights(format: str, layer: int) -> jax.Array | QTensor:
    if format == "bfloat16":
        return jax.random.normal(jax.random.key(layer), (OUT, IN), jnp.bfloat16)
    parts = []
    for i, part in enumerate(abstract(format, (OUT, IN)).parts):
        key = jax.random.fold_in(jax.random.key(layer), i)
        parts.append(random_part(key, part))
    return QTensor(format, tuple(parts), (OUT, IN))


def random_part(key: jax.Array, part: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers, or random small bytes for a part of one byte per element."""
    if part.dtype.itemsize > 1:
        return jax.random.uniform(key, part.shape, part.dtype)
    bits = jax.random.bits(key, part.shape, jnp.uint8) & 0x3F
    return bits if part.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(bits, part.dtype)


def matmul(x, w):
    w = dequantize(w, x.dtype) if isinstance(w, QTensor) else w
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def products(x, w):
    w = dequantize(w) if isinstance(w, QTensor) else w.astype(jnp.float32)
    return (x[:, None].astype(jnp.float32) * w).sum(-1).astype(x.dtype)


@partial(jax.jit, static_argnames="way")
def layers(x, many, way):
    for w in many:
        x = x + way(x, w)[:, :1] * 1e-6  # makes each call wait for the one before
    return x


def main():
    args, rows = report.arguments(__doc__.split("\n")[0]).parse_args(), []
    for format in FORMATS:
        many = [weights(format, layer) for layer in range(LAYERS)]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(many[0]))
        for n in (1, 4, 16):
            x, row = jnp.ones((n, IN), jnp.bfloat16), {"format": format, "rows": n}
            for way in (matmul, products) if n <= 4 else (matmul,):
                seconds = report.best_seconds(lambda x=x, many=many, way=way: layers(x, many, way), 10) / LAYERS
                row |= {f"{way.__name__} us": seconds * 1e6, f"{way.__name__} TB/s": size / seconds / 1e12}
            rows.append(row)
    report.show(rows, args.out)


if __name__ == "__main__":
    main()
