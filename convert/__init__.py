"""mla-convert: converts checkpoints to Orbax, and back to Hugging Face's format. A tool: no other package imports it."""
