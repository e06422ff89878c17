"""A conversion killed at fifty random moments ends as one that nobody disturbed, and takes the memory that its plan says."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import ml_dtypes
import models
import numpy as np
import pytest
from safetensors.numpy import save_file

from mla_jax.weights.orbax_store import open_store

KILLS = 50
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_hidden_layers": 5,
}
HF = {**models.FAMILIES["v3"], **SIZES, "q_lora_rank": 256, "num_nextn_predict_layers": 0}
HF |= {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def write_model(folder, hf=HF):
    """Random FP8 and its scales, as V3 has them: 200 MB."""
    rng, found = np.random.default_rng(0), {}
    codes = rng.integers(0, 256, 1 << 20, np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # what is no number
    for name, shape in models.shapes(hf).items():
        if name.endswith("_proj.weight") or "with_mqa" in name:
            moved = np.roll(codes, int(rng.integers(codes.size)))  # another order takes seconds, of so many
            found[name] = np.resize(moved, shape).view(ml_dtypes.float8_e4m3fn)
            found[name + "_scale_inv"] = rng.random([-(-n // 128) for n in shape], np.float32) + np.float32(0.1)
        else:
            found[name] = rng.random(shape, np.float32).astype(np.float32 if "bias" in name else ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(found, folder / "model.safetensors")
    return folder


# makes a converter of each line; they start at once, for all is imported. Says its number, exit code and processor time
NURSERY = """
    import os, sys
    from pathlib import Path
    import orbax.checkpoint.experimental.v1
    from convert import __main__, export, plan, tensors, verify, write
    tensors.STEP = 1  # a step a tensor
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = __main__.main(line.split())
            peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
            print(peak, file=sys.stderr, flush=True)
            os._exit(code)
        print(child, flush=True)
        _, status, used = os.wait4(child, 0)
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
"""


class Nursery:
    def __init__(self, log):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(NURSERY)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def convert(self, *arguments, kill_after: float | None = None) -> tuple[int, float]:
        """The exit code, and seconds of the processor; of the latter is `kill_after`, so that load moves no kill."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self.process.stdin.flush()
        (child,) = map(int, self._said())
        if kill_after is not None:
            with suppress(OSError), os.fdopen(os.pidfd_open(child)) as process:  # unless that has ended
                while time.clock_gettime(~child << 3 | 2) < kill_after:  # the clock that clock_getcpuclockid(3) gives
                    time.sleep(0.001)
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
        code, used = self._said()
        return int(code), float(used)

    def _said(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def close(self):
        self.process.communicate(timeout=600)


@pytest.mark.deep
@pytest.mark.slow
def test_after_fifty_kills_the_values_are_those_of_an_undisturbed_conversion(tmp_path):
    source, out, log = write_model(tmp_path / "hf"), tmp_path / "out", tmp_path / "log"
    with open(log, "w") as file:
        nursery = Nursery(file)
        whole, takes = nursery.convert(source, tmp_path / "undisturbed")
        planned, starts = nursery.convert(source, out, "--dry-run")
        assert (whole, planned) == (0, 0)
        draw, kills = random.Random(0), 0
        while not out.exists():
            moment = draw.uniform(0, starts + takes / 20) if kills < KILLS else None
            code, _ = nursery.convert(source, out, kill_after=moment)
            assert code == 0 or (code, moment is None) == (-signal.SIGKILL, False), log.read_text()
            kills += code != 0
        nursery.close()
    print(f"{kills} kills of a conversion that starts in {starts:.1f} s of the processor and takes {takes:.1f} s")
    assert kills > 10
    assert not (tmp_path / "out.partial").exists()
    assert_same(out, tmp_path / "undisturbed")
    assert "resuming at layer" in log.read_text()
    assert_as_planned(log.read_text())


def assert_same(one, other):
    a, b = open_store(one), open_store(other)
    assert (a.tensors.keys(), a.metadata) == (b.tensors.keys(), b.metadata)
    for name in a.tensors:
        for x, y in zip(a.read(name), b.read(name), strict=True):
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()


def assert_as_planned(said: str):
    """Of the undisturbed conversion, which is the first."""
    planned, unit = re.search(r"memory    at most ([\d.]+) (MiB|GiB)", said).groups()
    taken = int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) * 1024
    assert taken < 1.1 * float(planned) * {"MiB": 2**20, "GiB": 2**30}[unit]


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--to", "hf"), ("--to", "gguf", "--dtype", "q8_0")], ids=" ".join)
def test_two_gigabytes_take_the_memory_that_the_plan_says(tmp_path_factory, options):
    folder = tmp_path_factory.mktemp("large")
    source = write_model(folder / "hf", HF | {"hidden_size": 2048, "moe_intermediate_size": 1024, "n_routed_experts": 80})
    script = textwrap.dedent(NURSERY).replace("tensors.STEP = 1  # a step a tensor\n", "")
    command, out = [sys.executable, "-W", "ignore", "-c", script], folder / ("out.gguf" if "gguf" in options else "out")
    done = subprocess.run(command, input=" ".join(map(str, (source, out, *options))), capture_output=True, text=True)
    assert done.stdout.split()[1] == "0", done.stderr
    assert sum(path.stat().st_size for path in (out, *out.rglob("*")) if path.is_file()) > 2e9
    assert_as_planned(done.stderr)
    shutil.rmtree(folder)
