"""Machines of several NUMA nodes: a preloaded library (csrc/tests/fake_nodes.cpp) makes this one one of them.

The cores are real, so threads stay where they are told to; of the nodes' memory only the first is, so some moves are refused."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0))
FIRST, SECOND = ({*CORES[: len(CORES) // 2]}, {*CORES[len(CORES) // 2 :]})
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def listed(cores: set[int]) -> str:
    return ",".join(map(str, sorted(cores))) + "\n"


TWO = {"online": "0-1\n", "node0/cpulist": listed(FIRST), "node1/cpulist": listed(SECOND)}

PRELUDE = """
import contextlib, ctypes, hashlib, json, os, signal, sys, time
import numpy as np
from cpu_experts import Experts, layout, library
from moe_layers import fitting, random_batch, random_layer

def kept():  # the cores that threads are kept on, where these are not all
    sets = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the last layer's threads may be listed for a moment
            sets.add(tuple(sorted(os.sched_getaffinity(int(thread)))))
    return sorted(sets - {tuple(sorted(os.sched_getaffinity(0)))})

def settled(nodes):  # a thread goes to its node when it first runs, which on busy cores is after calls that did without it
    signal.alarm(60)
    while len(kept()) < nodes:
        time.sleep(0.01)
    signal.alarm(0)
"""

# Of each precision and size, what came out: the same on every number of threads. Some matrices have fewer panels than nodes.
FORWARDS = """
best = min(library.load().cpu_experts_best_isa(), 3)  # not tiles, which are slow where they are emulated,
lacks = "avx512_bf16" not in open("/proc/cpuinfo").read().split()
isa = library.ISAS[min(best, 2) if lacks else best]  # on processors with less, too
out, stayed = {}, set()
for precision in layout.FORMATS:
    for size, tokens in ((16, 1), (40, 50), (100, 9)):
        model, width = fitting(precision, size + 3, size)
        weights, batch = random_layer(3, model, width), random_batch(tokens, model, 3, 2)
        digests = set()
        for threads in THREADS:
            with Experts(*weights, precision, threads=threads, isa=isa) as layer:
                for _ in range(3):
                    digests.add(hashlib.sha256(layer.forward(*batch).tobytes()).hexdigest())
                if threads == 7:
                    settled(NODES)
                stayed.update(kept())
        out[f"{precision} {size}"] = sorted(digests)
print(json.dumps([out, sorted(stayed)]))
"""

FEW_FORWARDS = """
outs, stayed = [], []
for threads in (None, 1, 4):
    with Experts(*random_layer(3, 70, 50), threads=threads) as layer:
        outs.append(layer.forward(*random_batch(20, 70, 3, 2)))
        stayed += kept()
assert all((out == outs[0]).all() for out in outs)
print(json.dumps(stayed))
"""


def run(native, folder: Path, files: Mapping[str, str | bytes] | None, script: str):
    """A script's output, and the moves to nodes, on a machine with these files below /sys/devices/system/node."""
    moved = folder / "moved"
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    here, built = Path(__file__).parent, Path(native._name)
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here}", "CPU_EXPERTS_LIBRARY": str(built)}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}
    if files is not None:
        fake = folder / "fake_nodes.so"
        fake.symlink_to(built.parent / "libfake_nodes.so")  # a build's folder may have blanks in its name, which part preloads
        preloads = [os.environ.get("LD_PRELOAD", ""), str(fake)]
        environment |= {"LD_PRELOAD": " ".join(preloads).strip(), "CPU_EXPERTS_FAKE_NODES": str(folder)}
    done = subprocess.run([sys.executable, "-c", PRELUDE + script], env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Sanitizer" not in done.stderr
    lines = moved.read_text().splitlines() if moved.exists() else []
    return json.loads(done.stdout), [tuple(map(int, line.split())) for line in lines]


EVERY_THREADS = f"THREADS = (1, 2, 3, 7)\n{FORWARDS}"  # seven are threads for each of the nodes below


@pytest.fixture(scope="module")
def one_node(native, tmp_path_factory):
    (digests, stayed), moved = run(native, tmp_path_factory.mktemp("one"), None, "NODES = 0\n" + EVERY_THREADS)
    assert all(len(each) == 1 for each in digests.values())
    assert not stayed
    assert not moved
    return digests


@pytest.mark.deep
@two_cores
@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        (TWO, {0: FIRST, 1: SECOND}),
        ({"online": "2,7\n", "node2/cpulist": listed(FIRST), "node7/cpulist": listed(SECOND)}, {2: FIRST, 7: SECOND}),
        (TWO | {"online": "0-2\n", "node2/cpulist": listed({*CORES})}, {0: FIRST, 1: SECOND, 2: {*CORES}}),
        (TWO | {"online": "0-2\n", "node2/cpulist": "\n"}, {0: FIRST, 1: SECOND}),
        (TWO | {"online": "0-2\n", "node2/cpulist": "5000-6000,60000\n"}, {0: FIRST, 1: SECOND}),
    ],
    ids=["two", "other_numbers", "three", "one_without_cores", "one_that_may_not_be_used"],
)
def test_several_nodes_give_the_bits_of_one(native, one_node, tmp_path, files, nodes):
    kept = {tuple(sorted(cores)) for cores in nodes.values()} - {tuple(CORES)}
    (digests, stayed), moved = run(native, tmp_path, files, f"NODES = {len(kept)}\n{EVERY_THREADS}")
    assert digests == one_node
    assert {node for *_, node in moved} == {*nodes}
    assert {*map(tuple, stayed)} == kept


MOVED = """
def opened(threads):
    shape, sizes = (3, 512, 800), []
    for panels, inputs in ((50, 512), (16, 800)):
        sizes.append(3 * panels * layout.panel_bytes("bf16", inputs)[2])
    memory = [layout._pages(size) for size in sizes]
    for each in memory:
        each[:] = 1
    native = library.load()
    def mappings():
        return open("/proc/self/maps").read().count("\\n")
    before, handle = mappings(), ctypes.c_uint64()
    pointers = [each.ctypes.data for each in memory]
    weights = library.Weights(ctypes.sizeof(library.Weights), 0, 0, *shape, *pointers, *sizes, threads, 0, 64)
    library.check(native, native.cpu_experts_open(weights, handle))
    return pointers, before, mappings(), memory
opened(THREADS)  # the library and its threads have mappings of their own
pointers, before, after, memory = opened(THREADS)
print(json.dumps([pointers, before, after]))
"""


@two_cores
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_every_page_goes_to_the_node_whose_threads_read_it(native, tmp_path, threads):
    files = TWO | {"node0/cpulist": listed({CORES[0]}), "node1/cpulist": listed({CORES[1]}), "online": "0-1\n"}
    script = f"os.sched_setaffinity(0, {CORES[:2]})\nTHREADS = {threads}\n{MOVED}"
    (pointers, before, after), moved = run(native, tmp_path, files, script)
    assert after <= before + 2  # the second layer's own two at most: no rule is left behind that makes mappings of pages
    for base, panels, size in zip(pointers, (50, 16), (16 * 2048, 25 * 2048), strict=True):
        first, page = panels * -(-threads // 2) // threads, os.sysconf("SC_PAGESIZE")
        for at in range(base, base + 3 * panels * size, page):
            node = int((at - base) // size % panels >= first)
            assert [n for low, high, n in moved if low <= at < high][-1] == node


@pytest.mark.deep
@two_cores
@pytest.mark.parametrize(
    "files",
    [
        {},
        {**TWO, "online": ""},
        {**TWO, "online": "\n"},
        {**TWO, "online": "0-1"},
        {**TWO, "online": "0-\n"},
        {**TWO, "online": "1-0\n"},
        {**TWO, "online": "-1\n"},
        {**TWO, "online": "0,,1\n"},
        {**TWO, "online": "0;1\n"},
        {**TWO, "online": "0-99999999999999999999\n"},
        {**TWO, "online": "0-2\n"},
        {**TWO, "online": b"0\0-1\n"},
        {**TWO, "online": b"\xff" * 20000},
        {**TWO, "node1/cpulist": "x\n"},
        {**TWO, "node1/cpulist": f"{max(SECOND)}-\n"},
        {**TWO, "node1/cpulist": "\n"},
        {"online": "0-1\n", "node0/cpulist": listed({*CORES}), "node1/cpulist": "\n"},
        {"online": "0-1\n", "node0/cpulist": listed({*CORES}), "node1/cpulist": "5000-6000\n"},
        {"online": "0-1\n", "node0/cpulist": listed({*CORES})},
        {"online": "0\n", "node0/cpulist": listed({*CORES})},
        {"online": ",".join(map(str, range(70))) + "\n", **{f"node{i}/cpulist": listed({*CORES}) for i in range(70)}},
    ],
)
def test_what_tells_of_no_two_nodes_is_one(native, tmp_path, files):
    assert run(native, tmp_path, files, FEW_FORWARDS) == ([], [])


@pytest.mark.parametrize("core", sorted({CORES[0], CORES[-1]}))
def test_one_core_is_one_node(native, tmp_path, core):
    assert run(native, tmp_path, TWO, f"os.sched_setaffinity(0, {{{core}}})\n{FEW_FORWARDS}") == ([], [])


def test_one_thread_is_on_one_node(native, tmp_path):
    (_, stayed), moved = run(native, tmp_path, TWO, f"THREADS = (1,)\n{FORWARDS}")
    assert not stayed
    assert not moved


FORKED = """
import warnings
warnings.simplefilter("ignore")
weights, batch = random_layer(6, 64, 48), random_batch(12, 64, 6, 2)
layer = Experts(*weights, threads=4)
expected = layer.forward(*batch)
child = os.fork()
if child == 0:
    signal.alarm(60)
    same = all((layer.forward(*batch) == expected).all() for _ in range(20))
    settled(2)
    os._exit(0 if same else 1)
status = os.waitpid(child, 0)[1]
settled(2)
print(status)
"""


@two_cores
def test_a_forked_child_has_the_nodes_too(native, tmp_path):
    assert run(native, tmp_path, TWO, FORKED)[0] == 0
