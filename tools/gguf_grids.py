"""Writes mla_jax/base/gguf_grids.npz: the codebooks of GGUF's IQ types, from the `gguf` package (MIT licence).

An entry is a uint16: eight fields of two bits (IQ1, IQ2) or four of four bits (IQ3), the first value in the lowest bits.
mla_jax/base/gguf_blocks.py computes the values of fields. IQ1_M uses the codebook of IQ1_S."""

from pathlib import Path

import numpy as np
from gguf import quants

OUT = Path(__file__).resolve().parents[1] / "mla_jax" / "base" / "gguf_grids.npz"
TYPES = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def codes(name: str) -> np.ndarray:
    """A codebook; the package stores the fields in hexadecimal, in the same order."""
    kind = getattr(quants, name)
    found = np.frombuffer(bytes.fromhex(kind.grid_hex.decode("ascii")), "<u2")
    if len(found) != kind.grid_shape[0]:
        raise SystemExit(
            f"{name}: {len(found)} entries, expected {kind.grid_shape[0]}: the package has another layout now"
        )
    return found


if __name__ == "__main__":
    np.savez_compressed(OUT, **{name: codes(name) for name in TYPES})  # pyright: ignore[reportArgumentType]
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")
