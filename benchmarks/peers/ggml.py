"""llama.cpp: its graph of a layer's experts, run by the ggml libraries of llama-cpp-python.

The libraries are in the package, or in the folder LLAMA_CPP_LIB_PATH. Weights are placed as by llama.cpp's loader: in the first
of the CPU's buffer types that multiplies experts of their type, which repacks some types (CPU_REPACK; AMX buffers take no
experts). GGUF's types have the values of our parts, except that Q8_0 for int8 has float16 scales."""

import contextlib
import ctypes
import importlib.util
import os
import weakref
from functools import cache
from pathlib import Path

import numpy as np

from cpu_experts import layout
from peers import Batch

METHODS = {
    "bf16": ("BF16",),
    "int8": ("Q8_0",),
    "int4_g32": ("Q4_0",),
    "q8_0": ("Q8_0",),
    "q4_k": ("Q4_K",),
    "q6_k": ("Q6_K",),
}
F32, I32 = 0, 26
TYPES = {"bf16": 30, "int8": 8, "int4_g32": 2, "q8_0": 8, "q4_k": 12, "q6_k": 14}
BLOCK = 32  # values of Q8_0 and Q4_0
MEMORY = 2**20  # for a context's records of its tensors and graph

P, N, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t


class Init(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


FUNCTIONS = {  # of ggml.h, ggml-alloc.h, ggml-backend.h and ggml-cpu.h: result and argument types
    "ggml_version": (ctypes.c_char_p,),
    "ggml_log_set": (None, P, P),
    "ggml_init": (P, Init),
    "ggml_free": (None, P),
    "ggml_new_tensor_2d": (P, P, ctypes.c_int, N, N),
    "ggml_new_tensor_3d": (P, P, ctypes.c_int, N, N, N),
    "ggml_set_input": (None, P),
    "ggml_set_output": (None, P),
    "ggml_get_data": (P, P),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_swiglu_split": (P, P, P, P),
    "ggml_mul": (P, P, P, P),
    "ggml_add": (P, P, P, P),
    "ggml_cont": (P, P, P),
    "ggml_view_2d": (P, P, P, N, N, SIZE, SIZE),
    "ggml_new_graph": (P, P),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_gallocr_new": (P, P),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, P, P),
    "ggml_gallocr_free": (None, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_tensor_set": (None, P, P, SIZE, SIZE),
    "ggml_backend_graph_compute": (ctypes.c_int, P, P),
    "ggml_backend_get_device": (P, P),
    "ggml_backend_dev_backend_reg": (P, P),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, P, P),
    "ggml_backend_reg_get_proc_address": (P, P, ctypes.c_char_p),
    "ggml_threadpool_params_init": (None, P, ctypes.c_int),
    "ggml_threadpool_new": (P, P),
    "ggml_backend_cpu_init": (P,),
    "ggml_backend_cpu_set_n_threads": (None, P, ctypes.c_int),
    "ggml_backend_cpu_set_threadpool": (None, P, P),
}


# Drops ggml's log, in which every repacked tensor is a line
_UNHEARD = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, P)(lambda *_: None)


def about() -> str:
    return f"ggml {_ggml().ggml_version().decode()} from {_folder()}"


def named(method: str) -> str:
    return f"llama.cpp {method}"


def _folder() -> Path:
    if "LLAMA_CPP_LIB_PATH" in os.environ:
        return Path(os.environ["LLAMA_CPP_LIB_PATH"])
    package = importlib.util.find_spec("llama_cpp")
    if package is None:
        raise ImportError("no module llama_cpp, and LLAMA_CPP_LIB_PATH is not set")
    return Path(package.submodule_search_locations[0]) / "lib"


@cache
def _ggml() -> ctypes.CDLL:
    """The CPU library; symbols of the base library are found through it."""
    library = ctypes.CDLL(str(_folder() / "libggml-cpu.so"))
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.ggml_log_set(_UNHEARD, None)
    return library


class Cpu:
    """The CPU backend with a pool of threads, and the types of its buffers, the default one last."""

    def __init__(self, threads: int):
        ggml = _ggml()
        self.backend = ggml.ggml_backend_cpu_init()
        params = ctypes.create_string_buffer(4096)  # longer than the struct of any version
        ggml.ggml_threadpool_params_init(params, threads)
        ggml.ggml_backend_cpu_set_n_threads(self.backend, threads)
        ggml.ggml_backend_cpu_set_threadpool(self.backend, ggml.ggml_threadpool_new(params))
        self.device = ggml.ggml_backend_get_device(self.backend)
        registered = ggml.ggml_backend_dev_backend_reg(self.device)
        extra = ggml.ggml_backend_reg_get_proc_address(registered, b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(extra)(self.device)
        self.buffer_types = []
        while buffer_type := listed[len(self.buffer_types)]:
            self.buffer_types.append(buffer_type)
        self.buffer_types.append(ggml.ggml_backend_dev_buffer_type(self.device))


cpu = cache(Cpu)


class Layer:
    def __init__(
        self, method: str, parts: list[tuple[np.ndarray, ...]], formats: tuple[str, ...], threads: int
    ):
        self.cpu = cpu(threads)
        self.weights_memory, self.graph_memory = contextlib.ExitStack(), contextlib.ExitStack()
        weakref.finalize(self, self.weights_memory.close)
        weakref.finalize(self, self.graph_memory.close)
        self.width, self.model = parts[0][0].shape[1], parts[2][0].shape[1]
        inputs = (self.model, self.model, self.width)
        self.weights = [
            self._stored(_encoded(p, f), TYPES[f], k) for p, f, k in zip(parts, formats, inputs, strict=True)
        ]
        self.shape = None

    def __call__(self, batch: Batch) -> np.ndarray:
        if self.shape != batch.ids.shape:
            self._build(*batch.ids.shape)
        for tensor, array in zip(self.given, (batch.x, batch.ids, batch.weights), strict=True):
            _ggml().ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        if _ggml().ggml_backend_graph_compute(self.cpu.backend, self.graph):
            raise RuntimeError("ggml did not compute the graph")
        return self.out

    def _stored(self, encoded: np.ndarray, kind: int, inputs: int) -> int:
        """A tensor of all experts, in the first buffer type that can multiply them."""
        ggml, (experts, outputs) = _ggml(), encoded.shape[:2]
        for buffer_type in self.cpu.buffer_types:
            with contextlib.ExitStack() as memory:
                context = _context(memory)
                tensor = ggml.ggml_new_tensor_3d(context, kind, inputs, outputs, experts)
                buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
                memory.callback(ggml.ggml_backend_buffer_free, buffer)
                row = ggml.ggml_new_tensor_3d(context, F32, inputs, 1, 1)
                chosen = ggml.ggml_new_tensor_2d(context, I32, 1, 1)
                product = ggml.ggml_mul_mat_id(context, tensor, row, chosen)
                if ggml.ggml_backend_dev_supports_op(self.cpu.device, product):
                    ggml.ggml_backend_tensor_set(tensor, encoded.ctypes.data, 0, encoded.nbytes)
                    self.weights_memory.push(memory.pop_all())
                    return tensor
        raise RuntimeError(f"ggml multiplies no experts of its type {kind} here")

    def _build(self, tokens: int, chosen: int) -> None:
        """The graph for this number of tokens, as in llama.cpp's build_moe_ffn."""
        self.graph_memory.close()
        ggml, context, (gate, up, down) = _ggml(), _context(self.graph_memory), self.weights
        x = ggml.ggml_new_tensor_3d(context, F32, self.model, 1, tokens)
        ids = ggml.ggml_new_tensor_2d(context, I32, chosen, tokens)
        weights = ggml.ggml_new_tensor_3d(context, F32, 1, chosen, tokens)
        self.given = (x, ids, weights)
        for tensor in self.given:
            ggml.ggml_set_input(tensor)
        ups, gates = (ggml.ggml_mul_mat_id(context, matrix, x, ids) for matrix in (up, gate))
        hidden = ggml.ggml_swiglu_split(context, gates, ups)
        each = ggml.ggml_mul(context, ggml.ggml_mul_mat_id(context, down, hidden, ids), weights)
        row = 4 * self.model
        views = [
            ggml.ggml_view_2d(context, each, self.model, tokens, row * chosen, row * k) for k in range(chosen)
        ]
        out = views[0] if chosen > 1 else ggml.ggml_cont(context, views[0])
        for view in views[1:]:
            out = ggml.ggml_add(context, out, view)
        ggml.ggml_set_output(out)
        self.graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(self.graph, out)
        buffers = ggml.ggml_gallocr_new(self.cpu.buffer_types[-1])
        self.graph_memory.callback(ggml.ggml_gallocr_free, buffers)
        if not ggml.ggml_gallocr_alloc_graph(buffers, self.graph):
            raise MemoryError("ggml found no memory for the graph")
        values = (ctypes.c_float * (tokens * self.model)).from_address(ggml.ggml_get_data(out))
        self.out, self.shape = np.ctypeslib.as_array(values).reshape(tokens, self.model), (tokens, chosen)


def _context(memory: contextlib.ExitStack) -> int:
    context = _ggml().ggml_init(Init(MEMORY, None, True))
    memory.callback(_ggml().ggml_free, context)
    return context


def _encoded(parts: tuple[np.ndarray, ...], format: str) -> np.ndarray:
    """A matrix in GGUF's blocks."""
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    codes, scales = parts
    if format == "int4_g32":
        half = layout.from_bf16(scales).astype(np.float16)
    else:
        codes = codes.reshape(*codes.shape[:2], -1, BLOCK).view(np.uint8)
        half = np.broadcast_to(scales.reshape(*codes.shape[:2], -1), codes.shape[:3]).astype(np.float16)
    return np.concatenate([half[..., None].view(np.uint8), codes], axis=-1)
