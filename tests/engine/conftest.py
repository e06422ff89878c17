"""Fixtures of the tests of engines."""

import pytest
from models import FAMILIES, tensors, write


@pytest.fixture(scope="session")
def retrieving_folder(tmp_path_factory):
    """A small V3 whose latents may be in FP8."""
    hf = {**FAMILIES["v3"], "kv_lora_rank": 128, "num_nextn_predict_layers": 0}
    return write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))
