"""Accuracy of the quantised formats: the demo model's linear layers in each, compared with float32.

    python benchmarks/quantize.py --out quantize.json

Error: relative, by norm, of the weights and of the head, which is BF16 and not yet rounded to a format. KL: from float32's
next-token distribution, in bits per token. Text: the beginnings of held-out files of this Python's library. The weights are
FP8, so fp8_block changes nothing. Embedding, head, norms, router, uk and uv stay float32, as in the loader. The gguf package
packs GGUF types."""

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus
from mla_jax import LLM
from mla_jax.base.gguf_blocks import TYPES
from mla_jax.base.qtensor import QTensor, dequantize
from mla_jax.decode.loop import Programs
from mla_jax.weights.quantize import QUANTIZERS, quantize

FILES = 12  # the first ones that are long enough
PACKED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "TQ2_0")  # GGUF types that the gguf package can write
LATER = 32  # tokens at the beginning of a file that are not scored


def packed(w: np.ndarray, format: str) -> QTensor:
    if format in QUANTIZERS:
        return quantize(w, format)
    blocks, size = gguf.quants.quantize(w, gguf.GGMLQuantizationType[format]), TYPES[format].bytes
    return QTensor(format, (jnp.asarray(blocks.reshape(*w.shape[:-1], -1, size)),), w.shape)


def linear(state: nnx.State) -> dict[str, nnx.Variable]:
    """The parameters to quantise: matrices of the layers and stacks of them, without MTP, which logits do not use."""
    found = {".".join(map(str, keys)): slot for keys, slot in nnx.to_flat_state(state)}
    return {
        path: slot
        for path, slot in found.items()
        if slot.get_metadata()["packs"] and path.startswith("layers.")
    }


def logits(
    llm: LLM, tokens: np.ndarray, change: Callable[[np.ndarray], QTensor] | None
) -> tuple[np.ndarray, dict]:
    """Logits with the weights that `change` returns, and the size and error of these."""
    graph, state = nnx.split(nnx.clone(llm.model))
    error = square = size = count = 0.0
    for slot in linear(state).values() if change else ():
        w = np.asarray(slot.get_value(), np.float32)
        q = change(w)
        error, square = error + np.square(np.asarray(dequantize(q)) - w).sum(), square + np.square(w).sum()
        size, count = size + q.nbytes, count + w.size
        slot.set_value(q)
    found = Programs(nnx.merge(graph, state)).logits(jnp.asarray(tokens))
    if not change:
        return np.asarray(found), {}
    return np.asarray(found), {"bits": 8 * size / count, "error %": 100 * float(np.sqrt(error / square))}


def compared(given: np.ndarray, reference: np.ndarray, tokens: np.ndarray) -> dict:
    """Compares the distributions of all tokens except a row's first ones."""
    ours, exact = (np.asarray(jax.nn.log_softmax(x[:, LATER:-1])) / np.log(2) for x in (given, reference))
    following = tokens[:, LATER + 1 :, None]
    bits = [-np.take_along_axis(x, following, -1).mean() for x in (ours, exact)]
    return {
        "KL": float((np.exp2(exact) * (exact - ours)).sum(-1).mean()),
        "same best %": 100 * float((ours.argmax(-1) == exact.argmax(-1)).mean()),
        "perplexity": float(np.exp2(bits[0])),
        "change %": 100 * float(np.exp2(bits[0] - bits[1]) - 1),
    }


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=384, help="tokens of each text")
    parser.add_argument("--formats", nargs="+", default=[*QUANTIZERS, *PACKED], metavar="FORMAT")
    args = parser.parse_args()
    llm = LLM(dtype="float32")
    held_out = [file for file in corpus.sources() if corpus.is_held_out(file.path)]
    files = [file for file in held_out if len(file.text) > 8 * args.length][:FILES]
    tokens = np.array([llm.tokenizer.encode(file.text)[: args.length] for file in files], np.int32)
    reference, _ = logits(llm, tokens, None)
    head, about = np.asarray(llm.model.head[...], np.float32), {"gguf": metadata.version("gguf")}
    rows = [
        {
            "format": "float32",
            "bits": 32.0,
            "error %": 0.0,
            "head error %": 0.0,
            **compared(reference, reference, tokens),
        }
    ]
    for format in args.formats:
        found, said = logits(llm, tokens, lambda w, format=format: packed(w, format))
        said |= {
            "head error %": 100
            * float(np.linalg.norm(dequantize(packed(head, format)) - head) / np.linalg.norm(head))
        }
        rows.append({"format": format, **said, **compared(found, reference, tokens)})
    about |= {"files": [file.path for file in files], "tokens": tokens[:, LATER + 1 :].size}
    report.show(rows, args.out, **about)


if __name__ == "__main__":
    main()
