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

from mla_jax.weights.checkpoint import open_store

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
            found[name] = np.resize(rng.permuted(codes.reshape(1024, -1)), shape).view(ml_dtypes.float8_e4m3fn)
            found[name + "_scale_inv"] = rng.random([-(-n // 128) for n in shape], np.float32) + np.float32(0.1)
        else:
            found[name] = rng.random(shape, np.float32).astype(np.float32 if "bias" in name else ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(found, folder / "model.safetensors")
    return folder


# makes a converter of each line; they start at once, for all is imported
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
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    def __init__(self, log):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(NURSERY)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def convert(self, *arguments, kill_after: float | None = None) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self.process.stdin.flush()
        child = self._said()
        if kill_after is not None:
            with suppress(ProcessLookupError):  # that has ended
                descriptor = os.pidfd_open(child)
                time.sleep(kill_after)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return self._said()

    def _said(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=60)


@pytest.mark.slow
def test_after_fifty_kills_the_values_are_those_of_an_undisturbed_conversion(tmp_path):
    source, out, log = write_model(tmp_path / "hf"), tmp_path / "out", tmp_path / "log"
    with open(log, "w") as file:
        nursery = Nursery(file)
        takes = seconds(lambda: nursery.convert(source, tmp_path / "undisturbed"))
        starts = seconds(lambda: nursery.convert(source, out, "--dry-run"))
        draw, kills = random.Random(0), 0
        while not out.exists():
            moment = draw.uniform(0, starts + takes / 20) if kills < KILLS else None
            code = nursery.convert(source, out, kill_after=moment)
            assert code == 0 or (code, moment is None) == (-signal.SIGKILL, False), log.read_text()
            kills += code != 0
        nursery.close()
    print(f"{kills} kills of a conversion that starts in {starts:.1f} s and takes {takes:.1f} s")
    assert kills > 10
    assert not (tmp_path / "out.partial").exists()
    assert_same(out, tmp_path / "undisturbed")
    assert "resuming at layer" in log.read_text()
    assert_as_planned(log.read_text())


def seconds(act) -> float:
    start = time.monotonic()
    assert act() == 0
    return time.monotonic() - start


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


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--to", "hf")], ids=" ".join)
def test_two_gigabytes_take_the_memory_that_the_plan_says(tmp_path_factory, options):
    folder = tmp_path_factory.mktemp("large")
    source = write_model(folder / "hf", HF | {"hidden_size": 2048, "moe_intermediate_size": 1024, "n_routed_experts": 80})
    script = textwrap.dedent(NURSERY).replace("tensors.STEP = 1  # a step a tensor\n", "")
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, input=" ".join(map(str, (source, folder / "out", *options))), capture_output=True, text=True)
    assert done.stdout.split()[1:] == ["0"], done.stderr
    assert sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file()) > 2e9
    assert_as_planned(done.stderr)
    shutil.rmtree(folder)
