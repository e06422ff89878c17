"""Layers as objects: closed, closed twice, shared by threads, taken over a fork, left open at exit."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from forks import in_a_child
from moe_layers import random_batch, random_layer

from cpu_experts import Closed, Experts
from cpu_experts.library import NAME

LAYER, BATCH = random_layer(6, 64, 48), random_batch(12, 64, 6, 2)


def test_closed_is_an_error_twice_and_after(built):
    layer = Experts(*LAYER)
    layer.close()
    with pytest.raises(Closed):
        layer.close()
    with pytest.raises(Closed):
        layer.forward(*BATCH)


def test_a_dropped_layer_is_closed(built, native):
    layer = Experts(*LAYER)
    handle = layer._handle
    del layer
    assert native.cpu_experts_close(handle) == 4


def test_many_threads_on_several_layers_agree_with_one(built):
    layers = [Experts(*LAYER, precision, threads=2) for precision in ("bf16", "int8", "bf16")]
    expected = [layer.forward(*BATCH) for layer in layers]
    wrong = []

    def work(i: int) -> None:
        for _ in range(50):
            if not (layers[i % 3].forward(*BATCH) == expected[i % 3]).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for layer in layers:
        layer.close()


def test_closing_while_others_run_gives_results_or_closed(built):
    layer, ends = Experts(*LAYER, threads=2), []
    expected = layer.forward(*BATCH)

    def work() -> None:
        try:
            while True:
                assert (layer.forward(*BATCH) == expected).all()
        except Closed:
            ends.append(True)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    layer.close()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 3


CLOSING = """
import ctypes, sys, threading, time
import numpy as np
from cpu_experts import Experts
from cpu_experts.library import ForwardCall
rng = np.random.default_rng(0)
x, ids = rng.standard_normal((256, 256), np.float32), rng.integers(0, 8, (256, 2), np.int32)
weights, out = np.ones((256, 2), np.float32), np.empty((256, 256), np.float32)
gate, down = rng.standard_normal((8, 512, 256), np.float32), rng.standard_normal((8, 256, 512), np.float32)
for i in range(30):
    layer = Experts(gate, gate, down, threads=2)
    handle, begun = layer._handle, threading.Event()

    def work():  # as a program does: by number, holding nothing
        batch = ForwardCall(ctypes.sizeof(ForwardCall), 256, 2, 0, 0, *(a.ctypes.data for a in (x, ids, weights, out)))
        begun.set()
        while layer._library.cpu_experts_forward(handle, batch) == 0:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    time.sleep(0.001 * i)
    layer.close()  # gives the weights' memory back
    thread.join()
"""


def test_closing_waits_for_calls_by_handle_that_read_the_weights(built, native):
    environment = os.environ | {"CPU_EXPERTS_LIBRARY": native._name, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", CLOSING], env=environment, capture_output=True, text=True, timeout=1100)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_forked_child_uses_and_closes_its_parents_layer(built):
    layer = Experts(*LAYER, threads=3)
    expected = layer.forward(*BATCH)

    def act() -> bool:
        same = all((layer.forward(*BATCH) == expected).all() for _ in range(5))
        layer.close()
        with Experts(*LAYER, threads=2) as other:
            return same and bool((other.forward(*BATCH) == expected).all())

    assert in_a_child(act) == 0
    assert (layer.forward(*BATCH) == expected).all()
    layer.close()


SCRIPT = """
import threading, numpy as np
from cpu_experts import Experts
rng = np.random.default_rng(0)
layer = Experts(*(rng.standard_normal(s, np.float32) for s in ((4, 16, 32), (4, 16, 32), (4, 32, 16))), threads=2)
x, ids, weights = np.ones((500, 32), np.float32), np.zeros((500, 1), np.int32), np.ones((500, 1), np.float32)
def work():
    while True:
        layer.forward(x, ids, weights)
threading.Thread(target=work, daemon=True).start()
layer.forward(x, ids, weights)
"""


def test_the_interpreter_exits_with_a_forward_under_way(builds):
    environment = os.environ | {"CPU_EXPERTS_LIBRARY": str(builds() / NAME), "PYTHONPATH": str(Path(__file__).parents[2])}
    for _ in range(3):
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, timeout=600)


def test_more_threads_than_subtasks(built):
    layer = random_layer(1, 16, 16)
    batch = random_batch(1, 16, 1, 1)._replace(ids=np.zeros((1, 1), np.int32))
    with Experts(*layer, threads=16) as many, Experts(*layer, threads=1) as one:
        assert (many.forward(*batch) == one.forward(*batch)).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_child_forked_amid_forwards_of_other_threads_computes_the_same(built):
    layer, done = Experts(*LAYER, threads=2), threading.Event()
    expected = layer.forward(*BATCH)

    def work() -> None:
        while not done.is_set():
            layer.forward(*BATCH)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ends = [in_a_child(lambda: (layer.forward(*BATCH) == expected).all()) for _ in range(8)]
    done.set()
    for thread in threads:
        thread.join()
    assert not any(ends)
    layer.close()


ON_ONE_CORE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy as np
from cpu_experts import Experts
rng = np.random.default_rng(0)
weights = [rng.standard_normal(s, np.float32) for s in ((4, 48, 64), (4, 48, 64), (4, 64, 48))]
batch = np.ones((40, 64), np.float32), np.arange(40, dtype=np.int32)[:, None] % 4, np.ones((40, 1), np.float32)
outs = []
for threads in (None, 1, 4):
    with Experts(*weights, threads=threads) as layer:
        outs += [layer.forward(*batch) for _ in range(200)]
print(all((out == outs[0]).all() for out in outs))
"""

INTERRUPTED = """
import os, signal, threading, time
import numpy as np
from cpu_experts import Experts
weights = [np.full((1, 512, 512), 0.01, np.float32)] * 3
layer = Experts(*weights, threads=2, isa="portable", max_rows=64)
x, ids, ones = np.ones((200000, 512), np.float32), np.zeros((200000, 1), np.int32), np.ones((200000, 1), np.float32)
few = layer.forward(x[:64], ids[:64], ones[:64])
start = time.process_time()
def interrupt():
    while time.process_time() < start + 0.3:  # the forward has not begun, or others have the cores
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
try:
    threading.Thread(target=interrupt).start()
    layer.forward(x, ids, ones)
    print("ran to its end")
except KeyboardInterrupt:
    print("late" if time.process_time() - start > 10 else "soon", (layer.forward(x[:64], ids[:64], ones[:64]) == few).all())
layer.close()
"""


@pytest.mark.parametrize(("script", "said"), [(ON_ONE_CORE, "True"), (INTERRUPTED, "soon True")])
def test_on_one_core_and_interrupted(builds, script, said):
    """A minute of the processor's work, of which Ctrl-C leaves a third of a second and a turn; more threads than cores."""
    environment = os.environ | {"CPU_EXPERTS_LIBRARY": str(builds() / NAME), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, check=True, timeout=600, capture_output=True, text=True
    )
    assert done.stdout.strip() == said
