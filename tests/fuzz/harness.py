"""Helpers of the fuzzers: seeds from the corpora, and the checks of every input. Needs atheris, which no test needs.

    PYTHONPATH=.:tests python tests/fuzz/gguf_header.py -max_total_time=180

The options are libFuzzer's. Only our own errors may be raised, within a second and with at most 256 MB of additional memory."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import atheris

# an editable install finds modules by a loader of its own, which atheris does not see into
sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]

with atheris.instrument_imports(include=["mla_jax.base", "mla_jax.text", "mla_jax.weights"]):
    from faults.corpus import CORPORA
    from faults.cost import cost_of

    from mla_jax.base.errors import MlaJaxError

MAX_SEED, MAX_MEMORY = 1 << 16, 256 << 20


def spoilt(name: str, file: str, write_valid: Callable[[Path], object] | None = None) -> Iterable[bytes]:
    """The contents of `file` in each folder of a corpus, valid and spoilt, where small; `write_valid` makes smaller ones."""
    with tempfile.TemporaryDirectory() as temporary:
        valid, changed = Path(temporary) / "valid", Path(temporary) / "changed" / "model"
        (write_valid or CORPORA[name].write_valid)(valid)
        for base in valid.iterdir():
            yield from _small(base / file)
        for fault in (fault for fault in CORPORA[name].faults if (valid / fault.base).exists()):
            shutil.rmtree(changed.parent, ignore_errors=True)
            shutil.copytree(valid / fault.base, changed)
            with suppress(KeyError, OSError):  # of a tensor or a file that a smaller model lacks
                fault.mutate(changed)
            yield from _small(changed / file)


def _small(file: Path) -> Iterable[bytes]:
    if file.is_file() and file.stat().st_size <= MAX_SEED:
        yield file.read_bytes()


def fuzz(read: Callable[[Path, bytes], object], seeds: Iterable[bytes], words: Collection[str] = ()) -> None:
    """Calls `read` with an empty folder, always the same, and one input after the other; `words` are put into them at times."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, corpus, dictionary = (Path(temporary) / name for name in ("model", "seeds", "words"))
        folder.mkdir()
        corpus.mkdir()
        for i, seed in enumerate(dict.fromkeys(seeds)):
            (corpus / str(i)).write_bytes(seed)
        dictionary.write_text("".join(f'"{word}"\n' for word in words))

        def once(data: bytes) -> None:
            def act() -> None:
                with suppress(MlaJaxError):
                    read(folder, data)

            cost = cost_of(act)
            assert cost.seconds < 1, cost
            assert cost.memory < MAX_MEMORY, cost

        atheris.Setup([*sys.argv, *([f"-dict={dictionary}"] if words else []), str(corpus)], once)
        atheris.Fuzz()
