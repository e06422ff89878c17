"""A checkpoint's tokenizer, chat template and end tokens."""

import json

import models
import pytest
import tokenizers
from tokenizers.models import WordLevel

from mla_jax.engine.text import UNKNOWN_FORM, open_text
from mla_jax.weights.open import open_source

HF = {**models.FAMILIES["v3"], "num_nextn_predict_layers": 0}


@pytest.mark.parametrize(("normalizer", "notes"), [(None, ()), ({"type": "NFC"}, ()), ({"type": "Lowercase"}, (UNKNOWN_FORM,))])
def test_a_tokenizer_of_unknown_form_is_noted_and_works(tmp_path, normalizer, notes):
    models.write(tmp_path, HF, models.tensors(HF))
    model = tokenizers.Tokenizer(WordLevel({"a": 0, "A": 1}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(model.to_str()) | {"normalizer": normalizer}))
    text = open_text(open_source(tmp_path))
    assert text.notes == notes
    assert text.tokenizer.encode("A") == ([0] if notes else [1])
