"""The KV cache: its pages, eviction of tokens, retrieval of pages."""
