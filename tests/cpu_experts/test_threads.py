"""Threads that the system refuses to start: fewer of them compute, with the same result."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_experts.library import NAME

ROOT = Path(__file__).parents[2]
REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

static int left = 1 << 30; /* threads that may still be started */
void allow_threads(int count) { left = count; }

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    return left-- > 0 ? real(thread, attributes, run, argument) : EAGAIN;
}
"""
USER = """
import ctypes, os
import numpy as np
from moe_layers import random_batch, random_layer
from cpu_experts import Experts

allow = ctypes.CDLL(None).allow_threads
layer, batch = random_layer(4, 64, 96), random_batch(9, 64, 4, 2)
with Experts(*layer, threads=1) as one:
    expected = one.forward(*batch)
for started in (0, 1, 3):
    allow(started)
    before = len(os.listdir("/proc/self/task"))
    with Experts(*layer, threads=4) as few:
        assert len(os.listdir("/proc/self/task")) - before == started
        np.testing.assert_array_equal(few.forward(*batch), expected)
print("equal")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="replaces pthread_create by the dynamic linker of Linux")
def test_threads_that_cannot_be_started_are_done_without(builds, tmp_path):
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler to build a library that refuses threads")
    (tmp_path / "refusing.c").write_text(REFUSING)
    library = tmp_path / "refusing.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "refusing.c", "-ldl"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "CPU_EXPERTS_LIBRARY": str(builds() / NAME),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    done = subprocess.run([sys.executable, "-c", USER], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
