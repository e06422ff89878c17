"""Sizes by device and shape class: data. What was measured to choose them stands in each op's comments."""

UNITS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114}
DEFAULT_UNITS = 132

# latent rank -> slots of the ring of tiles; registers of (scores, left, right, feeder); in how many parts a tile's latent is
# copied (alone, in a cluster)
MLA_DECODE = {
    512: {"slots": 2, "registers": (168, 160, 160, 24), "parts": (1, 2)},
    256: {"slots": 4, "registers": (168, 160, 160, 24), "parts": (1, 2)},
    128: {"slots": 4, "registers": (168, 160, 160, 24), "parts": (1, 2)},
}
