"""Writes the golden folders: tiny models as transformers saves them, and their outputs there.

    python tests/golden/make.py

needs the extra `parity`. MTP layers, which transformers does not save, are put back as released checkpoints hold them."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import models  # noqa: E402
from parity import oracle  # noqa: E402

STEPS = 24


# Folders with MTP layers, and their families
WITH_MTP = {"v3_mtp": "v3", "v32": "v32", "glm_5": "glm_5"}


def main():
    for family in models.FAMILIES.keys() - WITH_MTP.keys():
        hf, folder = models.FAMILIES[family], _empty(family)
        with tempfile.TemporaryDirectory() as scratch:
            oracle.load(models.write(Path(scratch), hf, models.tensors(hf))).to(torch.bfloat16).save_pretrained(folder)
        _write(folder, oracle.load(folder), hf, {})
    for name, family in WITH_MTP.items():
        hf, folder = models.FAMILIES[family], _empty(name)
        models.write(folder, hf, {k: v.astype("bfloat16") for k, v in models.tensors(hf, mtp=True).items()})
        model = oracle.load(folder)
        _write(folder, model, hf, {"mtp_logits": oracle.mtp_logits(model, _tokens(hf))})


def _empty(name: str) -> Path:
    shutil.rmtree(HERE / name, ignore_errors=True)
    return HERE / name


def _tokens(hf: dict) -> np.ndarray:
    length = 200 if "index_topk" in hf else 20  # many times the tokens that each attends to
    return np.random.default_rng(1).integers(2, hf["vocab_size"], (2, length))


def _write(folder: Path, model, hf: dict, more: dict):
    tokens = _tokens(hf)
    greedy = np.array([oracle.greedy(model, row.tolist(), STEPS) for row in tokens])
    np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=oracle.logits(model, tokens), greedy=greedy, **more)


if __name__ == "__main__":
    main()
