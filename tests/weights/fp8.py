"""FP8 checkpoints made by numpy, and their numbers: written apart from the loader, so that each checks the other."""

import ml_dtypes
import numpy as np

SCALE = "_scale_inv"


def spread(scale: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """One scale for every element: element (i, j) is in block (i // rows, j // columns)."""
    rows, columns = np.indices(shape)
    return scale.astype(np.float32)[rows // block[0], columns // block[1]]


def quantize(weight: np.ndarray, block: tuple[int, int], *, powers_of_two: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 weights and one scale a block; the scales in E8M0 if they are `powers_of_two`."""
    scale = np.empty([-(-n // b) for n, b in zip(weight.shape, block, strict=True)], np.float32)
    for i, j in np.ndindex(*scale.shape):
        part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scale[i, j] = max(np.abs(part).max(), 1e-4) / 448
    if powers_of_two:
        scale = np.exp2(np.ceil(np.log2(scale))).astype(ml_dtypes.float8_e8m0fnu)
    scaled = weight / spread(scale, weight.shape, block)
    return np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def dequantize(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    return weight.astype(np.float32) * spread(scale, weight.shape, block)


def is_quantized(name: str) -> bool:
    """Releases keep embeddings, head, norms, router, eh_proj and weights_proj in BF16."""
    if name.endswith(("eh_proj.weight", "weights_proj.weight")):
        return False
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight"))


def quantized(weights: dict[str, np.ndarray], block: tuple[int, int], *, powers_of_two: bool = False) -> dict[str, np.ndarray]:
    """A released FP8 checkpoint of the same model."""
    found = {}
    for name, value in weights.items():
        if is_quantized(name):
            found[name], found[name + SCALE] = quantize(value, block, powers_of_two=powers_of_two)
        else:
            found[name] = value.astype(np.float32 if name.endswith("bias") else ml_dtypes.bfloat16)
    return found


def dequantized(weights: dict[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """An FP8 checkpoint, dequantised to float32."""
    whole = {name: value for name, value in weights.items() if not name.endswith(SCALE)}
    return {
        name: dequantize(value, weights[name + SCALE], block) if name + SCALE in weights else value.astype(np.float32)
        for name, value in whole.items()
    }
