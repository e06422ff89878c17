"""What is chosen: everything inside jit."""
