"""torch: a loop over experts with oneDNN's linear, gate and up as one matrix, each packed for its number of rows."""

import numpy as np

from peers import Batch

METHODS = {"bf16": ("bf16",)}


def about() -> str:
    import torch

    return f"torch {torch.__version__}"


def named(method: str) -> str:
    return f"torch {method}"


class Layer:
    def __init__(
        self, method: str, parts: list[tuple[np.ndarray, ...]], formats: tuple[str, ...], threads: int
    ):
        import torch

        torch.set_num_threads(threads)
        self.matrices = [torch.from_numpy(p[0].view(np.int16)).view(torch.bfloat16) for p in parts]
        self.rows, self.packed = 0, []

    def __call__(self, batch: Batch) -> np.ndarray:
        import torch

        experts = len(self.matrices[0])
        self._pack(max(1, len(batch.x) * 6 // experts))
        linear = torch.ops.mkldnn._linear_pointwise
        x = torch.from_numpy(batch.bits.view(np.int16)).view(torch.bfloat16)
        ids, weights = torch.from_numpy(batch.ids), torch.from_numpy(batch.weights)
        out = torch.zeros(x.shape)
        for e in ids.unique().tolist():
            token, k = torch.where(ids == e)
            g, u = linear(x[token], self.packed[e][0], None, "none", [], "").chunk(2, dim=-1)
            y = linear(torch.nn.functional.silu(g) * u, self.packed[e][1], None, "none", [], "")
            out.index_add_(0, token, y.float() * weights[token, k, None])
        return out.numpy()

    def _pack(self, rows: int) -> None:
        import torch

        if rows != self.rows:
            pack, (gate, up, down) = torch.ops.mkldnn._reorder_linear_weight, self.matrices
            self.packed = [
                (pack(torch.cat([g, u]), rows), pack(d.contiguous(), rows))
                for g, u, d in zip(gate, up, down, strict=True)
            ]
            self.rows = rows
