"""Figures of the notebooks, a module a subject. Notebooks import them from this folder, which lies beside them."""
