"""Writes the golden folders: tiny models as transformers saves them, and their outputs there.

    python tests/golden/make.py [family ..]

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


# Folders as released, and not as transformers saves them, with the family of each
RELEASED = {
    "v3_mtp": "v3",
    "v32": "v32",
    "glm_5": "glm_5",
    "pangu_ultra_moe": "pangu_ultra_moe",
    "longcat_flash": "longcat_flash",
}


def main():
    """Writes the folders that are named, by default all."""
    for name in sys.argv[1:] or [*models.FAMILIES, "v3_mtp"]:
        folder = HERE / name
        if name in RELEASED:
            write_as_released(folder, models.FAMILIES[RELEASED[name]])
        else:
            write_as_saved(folder, models.FAMILIES[name])


def write_as_saved(folder: Path, hf: dict):
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        oracle.load(models.write(Path(scratch), hf, models.tensors(hf))).to(torch.bfloat16).save_pretrained(folder)
    _write(folder, oracle.load(folder), hf, {})


def write_as_released(folder: Path, hf: dict):
    shutil.rmtree(folder, ignore_errors=True)
    models.write(folder, hf, {k: v.astype("bfloat16") for k, v in models.tensors(hf, mtp=True).items()})
    model = oracle.load(folder)
    has_mtp = hf.get("num_nextn_predict_layers", 0) > 0
    _write(folder, model, hf, {"mtp_logits": oracle.mtp_logits(model, _tokens(hf))} if has_mtp else {})


def _tokens(hf: dict) -> np.ndarray:
    length = 200 if "index_topk" in hf else 20  # many times the tokens that each attends to
    return np.random.default_rng(1).integers(2, hf["vocab_size"], (2, length))


def _write(folder: Path, model, hf: dict, more: dict):
    tokens = _tokens(hf)
    greedy = np.array([oracle.greedy(model, row.tolist(), STEPS) for row in tokens])
    np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=oracle.logits(model, tokens), greedy=greedy, **more)


if __name__ == "__main__":
    main()
