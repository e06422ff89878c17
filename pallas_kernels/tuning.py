"""Block sizes by device and shape class: data only. Each op's comments explain the choice; benchmarks/tune.py tries others."""

UNITS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114}
DEFAULT_UNITS = 132

# latent rank -> registers of the warpgroups for scores, for sums
MLA_DECODE = {
    512: {"registers": (96, 160)},
    256: {"registers": (96, 160)},
    128: {"registers": (96, 160)},
}

# the same for few queries (tokens times heads): columns of the latent in a part of a tile; parts in a worker's ring for up to
# 8, 16, 24, 32 queries; registers of (a worker, the feeder)
MLA_DECODE_MOST = 32
MLA_DECODE_FEW = {
    512: {"width": 128, "slots": (5, 5, 5, 5), "registers": (240, 24)},
    256: {"width": 128, "slots": (5, 5, 5, 5), "registers": (240, 24)},
    128: {"width": 64, "slots": (6, 6, 6, 6), "registers": (240, 24)},
}
MLA_DECODE_FEW_FP8 = {
    512: {"width": 128, "slots": (9, 9, 2, 2), "registers": (240, 24)},
    256: {"width": 128, "slots": (5, 5, 5, 5), "registers": (240, 24)},
    128: {"width": 64, "slots": (6, 6, 6, 6), "registers": (240, 24)},
}

# widths of keys and values -> keys in a tile, slots of its ring; heads at a time; registers of (either worker, the feeder)
MLA_PREFILL = {
    (192, 128): {"chunk": 128, "slots": 2, "near": 4, "registers": (240, 240, 24)},
    (256, 256): {"chunk": 64, "slots": 2, "near": 4, "registers": (240, 240, 24)},
}

# The TPU kernels: device kind -> sizes. Chosen by the number of bundles in the compiler's schedule, plus 0.35 us per grid step;
# not timed. The tests assert that scoped VMEM is at most 10 MiB of a program's default of 16.
# query rows in a block, cached tokens in a chunk
MLA_DECODE_TPU = {
    "TPU v5 lite": {"rows": 512, "chunk": 512},
    "other": {"rows": 512, "chunk": 1024},
}
# queries in a block, keys in a chunk
MLA_PREFILL_TPU = {
    "TPU v5 lite": {"block": 512, "chunk": 1024},
    "other": {"block": 1024, "chunk": 1024},
}
PAGE_TABLE_TPU = 128 << 10  # entries, in half of the scalar memory

# ragged_dot: kind of operands -> most tokens in a tile -> slots of the ring, depth of a step, smaller numbers of tokens with
# programs of their own. Shared memory limits the slots: a multiprocessor keeps 160 to 200 KiB of loads in flight. The smallest
# width is chosen that holds an average group plus the copies' alignment. Converted weights leave no registers for 96 tokens,
# scales none for 128. Four tiles of 144 hold a group of 512 rows and its random spread. The programs are those with the least
# unused arithmetic for 44 to 1,024 rows per group, routed at random, with more weight on 256 and 512.
RAGGED_DOT = {
    "bf16": {8: (6, 64), 16: (6, 64), 32: (5, 64), 64: (5, 64), 144: (4, 64, 56, 80, 104, 128, 136)},
    "w8": {8: (6, 128), 16: (6, 128), 32: (5, 128), 64: (4, 128)},
    "w8a8": {8: (6, 128), 16: (6, 128), 32: (5, 128), 64: (5, 128), 96: (4, 128, 56, 72, 88)},
}
# The same with packed weights, by their bits: loads in flight as above, tokens as many as leave registers. Only Q4_K has been
# timed (H100, benchmarks/packed.py), with these sizes alone.
PACKED = {
    4: {8: (8, 128), 16: (8, 128), 32: (7, 128), 64: (5, 128), 128: (4, 128, 96)},
    6: {8: (6, 128), 16: (6, 128), 32: (5, 128), 64: (4, 128), 128: (3, 128, 96)},
    8: {8: (5, 128), 16: (5, 128), 32: (4, 128), 64: (3, 128), 128: (3, 128, 96)},
}
PACKED_BITS = {"fp8_block": 8, "fp8_row": 8, "int8": 8, "int4_g32": 4, "int4_g128": 4, "Q8_0": 8}
PACKED_BITS |= {"uint4_g32": 6, "uint4_g128": 6}  # with the bytes of their scales and zero points
PACKED_BITS |= {"Q5_0": 6, "Q5_1": 6, "Q4_K": 4, "Q5_K": 6, "Q6_K": 6}
RAGGED_DOT |= {kind: PACKED[bits] for kind, bits in PACKED_BITS.items()}
# Kind and tokens in a tile -> the most groups beside whose table, 12 bytes for each, all slots fit; with more there is one less
RAGGED_DOT_GROUPS = {("w8", 16): 384, ("Q4_K", 128): 256}
RAGGED_DOT_REGISTERS = 240, 24  # of a worker, of the feeder
PACKED_REGISTERS = 232, 40  # which has more arrays to copy

# moe_decode: depth of a step; slots of the ring for gate and up, for down: about 200 KiB of loads in flight
MOE_DECODE = {"depth": 128, "slots": (6, 10)}
