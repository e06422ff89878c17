"""Conversion in GB/s compared with the disk's rate, and its peak memory compared with the plan.

    python benchmarks/convert.py --gib 2 --out convert.json

Converts a folder of DeepSeek-V3's widths (fewer layers, experts and tokens) with random FP8 weights to Orbax, verifies it, and
converts it back; and random Q4_K blocks in a GGUF file to Orbax. Sources are read cold. Before and after each run the same
number of bytes is written to the same disk by plain writes and one fsync, and copied file to file, which reads too, as a
conversion does. Figures are medians over the rounds; a ratio is the median of the rounds' ratios."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import report
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "weights"))
import as_gguf

from mla_jax import Config, Transformer
from mla_jax.base import axes
from mla_jax.base.qtensor import nbytes
from mla_jax.weights.gguf_names import GGUF
from mla_jax.weights.hf_names import HF, LINEAR, SCALE
from mla_jax.weights.names import NameTable, value_half

ROOT = Path(__file__).parent.parent
PIECE = 16 << 20  # bytes of one plain write
CHILD = """
import json, sys
from convert import __main__ as tool, export, progress
found, peak = {}, export.peak
export.peak = lambda *given: found.setdefault("plan", peak(*given))
progress.Bar.close = lambda bar, seconds: found.update({bar.title: [bar.total, seconds]})
tool._say = lambda planned: found.update(plan=planned.peak)
code = tool.main(sys.argv[1:])
print(json.dumps(found))
sys.exit(code)
"""


def model(gib: float) -> Config:
    """DeepSeek-V3 with the number of layers that gives about `gib` GiB of FP8: 0.55 GiB per layer, the first one dense."""
    layers = max(2, round((gib - 0.22) / 0.54))
    few = {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 8192,
        "num_nextn_predict_layers": 0,
    }
    return Config.from_hf(
        Config.preset("v3").to_hf() | few | {"num_hidden_layers": layers, "first_k_dense_replace": 1}
    )


def tensors(config: Config, table: NameTable) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """The name and shape of every tensor, and whether it is a matrix of a linear layer."""
    _, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))
    for keys, slot in nnx.to_flat_state(state):
        path = ".".join(map(str, keys))
        source = table.find(path, config)
        linear = slot.get_metadata()["packs"] and path not in ("embed", "head")
        if table is GGUF or source.part is not value_half:  # kv_b_proj is one tensor in a released folder
            yield from ((name, axes.shape(config, source.axes), linear) for name in source.names)


def fp8_folder(config: Config, folder: Path) -> Path:
    """Writes a folder as released: random E4M3 with scales, the rest in bfloat16 and float32."""
    rng = np.random.default_rng(0)
    content = {
        "F8_E4M3": rng.integers(0, 256, PIECE, np.uint8) & 0xF7,  # no NaN
        "BF16": rng.standard_normal(PIECE // 2).astype(ml_dtypes.bfloat16),
        "F32": rng.uniform(1e-4, 2e-4, PIECE // 4).astype(np.float32),
    }
    header, end = {}, 0
    for name, dtype, shape in fp8_tensors(config):
        start, end = end, end + prod(shape) * content[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(config.to_hf() | {"quantization_config": {"quant_method": "fp8"}})
    )
    with open(folder / "model.safetensors", "wb") as file:
        text = json.dumps(header).encode()
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in header.values():
            start, end = tensor["data_offsets"]
            repeat(file, content[tensor["dtype"]].view(np.uint8), end - start)
    return folder


def fp8_tensors(config: Config) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The name, dtype and shape of every tensor of a released FP8 folder."""
    for name, shape, _ in tensors(config, HF):
        if LINEAR.fullmatch(name):
            yield name, "F8_E4M3", shape
            yield name + SCALE, "F32", tuple(-(-n // 128) for n in shape)
        else:
            yield name, "F32" if name.endswith("bias") else "BF16", shape


def repeat(file, content: np.ndarray, size: int) -> None:
    for done in range(0, size, content.nbytes):
        file.write(content[: size - done].data)


def q4_k_file(config: Config, path: Path) -> Path:
    """Writes a GGUF file with random Q4_K blocks of small scales; norms, routers and other vectors are float32."""
    found = [(name, shape, linear) for name, shape, linear in tensors(config, GGUF)]
    most = max(nbytes("Q4_K", shape) for _, shape, linear in found if linear)
    blocks = np.random.default_rng(0).integers(0, 256, (most // 144, 144), np.uint8)
    blocks[:, [1, 3]] &= 0x83  # exponents of the two scales of a block
    ones = np.ones(max(prod(shape) for _, shape, linear in found if not linear), np.float32)

    def content(shape: tuple[int, ...], packed: bool):
        if not packed:
            return ones[: prod(shape)].reshape(shape)
        rows = blocks.reshape(-1)[: nbytes("Q4_K", shape)].reshape(*shape[:-1], -1)
        return rows, gguf.GGMLQuantizationType.Q4_K

    packs = {name: linear and shape[-1] % 256 == 0 for name, shape, linear in found}
    hf = {
        key: value
        for key, value in config.to_hf().items()
        if value is not None or key in ("q_lora_rank", "rope_scaling")
    }
    return as_gguf.write(
        path, as_gguf.keyed(hf), {name: content(shape, packs[name]) for name, shape, _ in found}
    )


def size(path: Path) -> int:
    return sum(
        file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()
    )


def cool(path: Path) -> None:
    """Drops files from the page cache, after they are written to the disk."""
    os.sync()
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.sync()


def plain_write(target: Path, total: int) -> float:
    """Bytes per second of plain writes and one fsync."""
    content = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8)
    return timed(target, total, lambda file: repeat(file, content, total))


def plain_copy(source: Path, target: Path) -> float:
    """Bytes per second of copying a cold source piece by piece, with one fsync."""
    cool(source)
    files = [source] if source.is_file() else [file for file in source.rglob("*") if file.is_file()]

    def run(out):
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                shutil.copyfileobj(opened, out, PIECE)

    return timed(target, size(source), run)


def timed(target: Path, total: int, run: Callable) -> float:
    start = time.perf_counter()
    with open(target, "wb", buffering=0) as file:
        run(file)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    remove(target)
    return total / seconds


def converted(*arguments: str | Path) -> dict:
    """Runs the tool in a process of its own; its own figures, and the process's peak memory in bytes."""
    start = time.perf_counter()
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said, faults = child.stdout.read(), child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(faults.decode())
    return json.loads(said.splitlines()[-1]) | {
        "peak": used.ru_maxrss * 1024,
        "seconds": time.perf_counter() - start,
    }


def round_of(name: str, source: Path, target: Path, scratch: Path, *options: str) -> Iterator[dict]:
    """One conversion between two measurements of the disk: a row for writing, and a row for the verify pass, if any."""
    total = size(source)
    writes, copies = [plain_write(scratch, total)], [plain_copy(source, scratch)]
    cool(source)
    found = converted(source, target, *options)
    writes, copies = [*writes, plain_write(scratch, total)], [*copies, plain_copy(source, scratch)]
    disk, copy = statistics.mean(writes), statistics.mean(copies)
    for title, what in (("writing", name), ("verifying", f"{name}, verify pass")):
        if title in found and found[title][0]:
            row = {"what": what} | rates(*found[title], disk, copy)
            yield row | memory(found) if title == "writing" else row


def rates(done: int, seconds: float, disk: float, copy: float) -> dict[str, float]:
    """Of `done` bytes, compared with the rates of plain writes and of copies."""
    rate = done / seconds
    row = {"GB": done / 1e9, "GB/s": rate / 1e9, "disk GB/s": disk / 1e9, "copy GB/s": copy / 1e9}
    return row | {"of disk %": 100 * rate / disk, "of copy %": 100 * rate / copy}


def memory(found: dict) -> dict[str, float | None]:
    """The plan's and the process's peak memory, and its time."""
    planned, peak = found.get("plan"), found["peak"]
    row = {"plan MiB": planned and planned / 2**20, "peak MiB": peak / 2**20}
    return row | {"peak of plan %": planned and 100 * peak / planned, "seconds in all": found["seconds"]}


def measured(args) -> list[dict]:
    config, found = model(args.gib), []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        work = Path(folder)
        fp8, packed = fp8_folder(config, work / "fp8"), q4_k_file(config, work / "q4_k.gguf")
        jobs = [("FP8 to Orbax", fp8, "orbax", ()), ("Orbax to HF", work / "orbax", "hf", ("--to", "hf"))]
        jobs += [
            ("GGUF Q4_K to Orbax", packed, "store", ()),
            ("FP8 to int8", fp8, "int8", ("--dtype", "int8")),
        ]
        for _ in range(args.rounds):
            for name, source, target, options in (job for job in jobs if job[0] in args.only):
                found += round_of(name, source, work / target, work / "scratch", *options)
                if target != "orbax":
                    remove(work / target)
            remove(work / "orbax")
    return found


def medians(rows: list[dict]) -> Iterator[dict]:
    for what in dict.fromkeys(row["what"] for row in rows):
        same = [row for row in rows if row["what"] == what]
        said = {key for key, value in same[0].items() if value is None or isinstance(value, str)}
        yield {
            key: value if key in said else statistics.median(row[key] for row in same)
            for key, value in same[0].items()
        }


def main() -> None:
    names = ("FP8 to Orbax", "Orbax to HF", "GGUF Q4_K to Orbax", "FP8 to int8")
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2, help="approximate size of the FP8 folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="WHAT")
    args = parser.parse_args()
    rounds = measured(args)
    report.show(list(medians(rounds)), args.out, gib=args.gib, rounds=rounds)


if __name__ == "__main__":
    main()
