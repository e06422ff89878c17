"""Writes a tiny V3-shaped model with random weights and a small tokenizer, to try the program before a trained model exists."""

import json
import sys
from pathlib import Path

import tokenizers
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.weights.save import save

CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def train_tokenizer(size: int, specials: list[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of `size` tokens, learnt from this project's own source."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    settings = {"vocab_size": size, "special_tokens": specials, "initial_alphabet": alphabet, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(**settings)
    sources = sorted(Path(__file__).parent.parent.glob("mla_jax/**/*.py"))
    model.train_from_iterator((path.read_text() for path in sources), trainer)
    return model


def main(folder: Path):
    if (folder / "config.json").exists():
        return
    config = Config.preset("tiny")
    save(Transformer(config, nnx.Rngs(0), mtp=True), folder)
    train_tokenizer(config.vocab_size, ["<bos>", "<eos>", "<user>", "<assistant>"]).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    print(f"wrote a tiny model with random weights to {folder}: what it generates is noise", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
