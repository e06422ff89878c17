"""llama.cpp's converter, quantiser, logits and tokens for a model. The other side of every comparison of GGUF.

The converter is no part of the installed package but of its source distribution, in vendor/llama.cpp. It is looked for in
the folder that LLAMA_CPP names, else in .llama.cpp beside the tests, where `make parity` unpacks it."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import llama_cpp as lib
import models
import numpy as np

from mla_jax.weights.hub import DEMO

SOURCE = Path(os.environ.get("LLAMA_CPP") or Path(__file__).parents[2] / ".llama.cpp")
THREADS = os.cpu_count() or 1
TYPES = {m[1]: value for name, value in vars(lib).items() if (m := re.fullmatch("LLAMA_FTYPE_(?:MOSTLY|ALL)_(.+)", name))}
# In a process of its own, for it brings its own gguf package. The tokenizer is known by a hash there, and the demo's to nobody.
CONVERT = """
import sys
source, mtp, *sys.argv = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf
from conversion.base import TextModel
from conversion.deepseek import DeepseekV2Model
from conversion.glm import Glm4MoeLiteModel
TextModel.get_vocab_base_pre = lambda *_: "deepseek-v3"
Glm4MoeLiteModel.set_vocab = DeepseekV2Model.set_vocab
if mtp == "mtp":  # which it writes for the one family whose class knows how
    convert_hf_to_gguf.get_model_class = lambda *_, **__: Glm4MoeLiteModel
convert_hf_to_gguf.main()
"""
said: list[str] = []  # what llama.cpp logged


@lib.llama_log_callback
def _listen(level: int, text: bytes, _):
    said.append(text.decode(errors="replace"))


lib.llama_log_set(_listen, ctypes.c_void_p(0))


def convert(folder: Path, file: Path, *, mtp: bool = False, kind: str = "f32", options: tuple[str, ...] = ()) -> Path:
    """An HF folder as llama.cpp's own converter writes it; `mtp`: with the MTP layer, which it leaves out of DeepSeek's."""
    words = [str(SOURCE), "mtp" if mtp else "", "convert", str(folder), "--outtype", kind, "--outfile", str(file), *options]
    command, offline = [sys.executable, "-c", CONVERT, *words], {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return file


def folder(path: Path, hf: dict, architecture: str, seed: int = 0, mtp: bool = False) -> Path:
    """A random model with the demo's tokenizer, as a folder that the converter takes."""
    weights = models.tensors(hf, seed, mtp)
    models.write(path, {**hf, "architectures": [architecture]}, weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    return path


def quantize(source: Path, file: Path, kind: str, *, even: bool = False) -> Path:
    """Quantised by llama.cpp to a type, F32 to multiply everything out; `even`: with an importance matrix of ones."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = TYPES[kind], THREADS, True
    if even:
        matrix = _ones(source)
        params.imatrix = matrix
    said.clear()
    refused = lib.llama_model_quantize(os.fsencode(source), os.fsencode(file), ctypes.byref(params))
    assert not refused, "".join(said)[-500:]
    return file


def _ones(source: Path):
    """An importance matrix in which every column counts the same."""
    found = []
    for tensor in gguf.GGUFReader(source).tensors:
        if len(tensor.shape) >= 2:
            size = int(tensor.shape[0]) * (int(tensor.shape[2]) if len(tensor.shape) > 2 else 1)
            ones = (ctypes.c_float * size)(*[1.0] * size)
            found.append(lib.llama_model_imatrix_data(tensor.name.encode(), ones, size))
    return (lib.llama_model_imatrix_data * (len(found) + 1))(*found)  # a nameless one ends it


@contextmanager
def opened(file: Path, mtp: bool = False) -> Iterator[ctypes.c_void_p]:
    said.clear()
    params = lib.llama_model_default_params()
    params.use_mmap, params.load_mtp = False, mtp
    params.use_extra_bufts = False  # weights as they are in the file, not repacked
    model = lib.llama_model_load_from_file(os.fsencode(file), params)
    assert model, "".join(said)[-2000:]
    yield model
    lib.llama_model_free(model)


def logits(file: Path, tokens: list[int], hidden: np.ndarray | None = None) -> np.ndarray:
    """float32 `[T W]`; with `hidden [T D]`, those of the MTP layer that is given each token's hidden state and the next token."""
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(len(tokens), 64)
    params.type_k = params.type_v = lib.GGML_TYPE_F32
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_threads = params.n_threads_batch = THREADS
    for name, field in gguf.GGUFReader(file).fields.items():
        if name.startswith("deepseek2.rope.scaling.yarn_beta"):  # which llama.cpp does not read: 32 and 1 for every model
            setattr(params, name.rpartition(".")[-1], field.contents())
    if hidden is not None:
        params.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
    with opened(file, mtp=hidden is not None) as model:
        context = lib.llama_init_from_model(model, params)
        assert context, "".join(said)[-2000:]
        assert lib.llama_decode(context, _batch(tokens, hidden)) == 0, "".join(said)[-2000:]
        width = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        found = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), width)).copy()
        lib.llama_free(context)
    return found


def _batch(tokens: list[int], hidden: np.ndarray | None):
    count = len(tokens)
    batch = lib.llama_batch(count)
    batch.token, batch.pos = (lib.llama_token * count)(*tokens), (lib.llama_pos * count)(*range(count))
    batch.logits = (ctypes.c_int8 * count)(*[1] * count)
    if hidden is not None:
        batch.embd = (ctypes.c_float * hidden.size)(*hidden.ravel().tolist())
    return batch


def tokenize(file: Path, texts: list[str], *, bos: bool = False) -> list[list[int]]:
    """The tokens of each text, in which no text stands for a control token."""
    with opened(file) as model:
        return [_tokens(lib.llama_model_get_vocab(model), text.encode(), bos) for text in texts]


def _tokens(vocab, data: bytes, bos: bool) -> list[int]:
    room = len(data) + 2
    found = (lib.llama_token * room)()
    return found[: lib.llama_tokenize(vocab, data, len(data), found, room, bos, False)]


def rewritten(source: Path, file: Path, keys: dict, tensors: Iterable[tuple[str, np.ndarray]]) -> Path:
    """A file with the metadata of `source`, other values for its `keys` (None: without that key), and float32 `tensors`."""
    writer = gguf.GGUFWriter(file, "deepseek2")
    for name, field in gguf.GGUFReader(source).fields.items():
        value = keys.get(name, field.contents())
        if value is not None and not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], inner)
    for name, value in tensors:
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def values(file: Path) -> dict[str, np.ndarray]:
    """Every tensor in float32, multiplied out by the gguf package."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}
