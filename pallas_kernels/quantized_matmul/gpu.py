"""The kernel of `ragged_dot` with one group of all rows.

Decoding has few rows, and so fewer tiles than multiprocessors: the depth is split among these."""

from pallas_kernels.fp8 import Fp8
from pallas_kernels.ragged_dot import gpu


def quantized_matmul(x, w, *, out_dtype, units, **options):
    """As `quantized_matmul` of the package; `options` are those of `grouped`."""
    one = Fp8(w.codes[None], w.scale[None]) if isinstance(w, Fp8) else w[None]
    return gpu.grouped(x, (one,), None, out_dtype=out_dtype, units=units, **options)
