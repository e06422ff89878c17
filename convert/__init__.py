"""mla-convert: checkpoints of any kind in, Orbax out, and back to Hugging Face's format. A tool; nobody imports it."""
