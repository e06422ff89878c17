"""How fast devices speak to each other, and the kinds of device that can be planned for without having one. No JAX here."""

from typing import NamedTuple

from mla_jax.base.roofline import DEVICES, Device


class Links(NamedTuple):
    """Rates at which one device receives while all send, in bytes/s: `ring` in rings, `to_all` when each sends to all others.

    They hold within an island of `island` devices; traffic between islands takes the network, `far` for each device.
    `latency` is the time of a collective without contents, in seconds."""

    ring: float
    to_all: float
    island: int
    far: float
    latency: float


# The vendors' figures times 0.8, as in DEVICES, but times 0.4 for NVLink. Rings of NCCL reach 365 to 370 of H100's 450 GB/s with
# large messages (NVIDIA/nccl issue 1455). Messages of prompts have 8 to 59 MB, and reach 70 to 200 GB/s between H100s and H200s.
# An all-to-all of 59 MB reaches 160 between two H200s (mesh/across.py). A message of 1 to 64 rows of V3 takes 12 to 25 us there,
# whether it gathers or sums, and the kernels around it wait for as long again in part.
# All of this is of 2026-11-26. GPUs of several hosts have a network card of 400 Gbit/s each, of 200 on an A100 (NVIDIA's data
# sheets of DGX).
#
# TPUs: ports of a chip and their sum are in Google's pages of each generation (v5e 4 and 1,600 Gbit/s, v5p 6 and 1,200 GB/s in
# both directions, v6e 4 and 3,200 Gbit/s). Eight chips are 2x4 or 2x2x2 without a way around, so a chip at a corner has two,
# on v5p three. When each sends to all others, 4/7 of the bytes of four chips wait for the two links, on v5p four, to the other
# half. A hop takes about a microsecond (jax-ml.github.io/scaling-book).
_NVSWITCH = {"island": 8, "far": 0.8 * 50e9, "latency": 26e-6}
LINKS = {  # by the name of the device's figures
    "NVIDIA A100": Links(0.4 * 300e9, 0.4 * 300e9, 8, 0.8 * 25e9, 26e-6),
    "NVIDIA H100": Links(0.4 * 450e9, 160e9, **_NVSWITCH),
    "NVIDIA H200": Links(0.4 * 450e9, 160e9, **_NVSWITCH),
    "NVIDIA B200": Links(0.4 * 900e9, 0.4 * 900e9, **_NVSWITCH),
    "TPU v5e": Links(0.8 * 100e9, 0.8 * 44e9, 256, 0.8 * 3.1e9, 5e-6),
    "TPU v5p": Links(0.8 * 300e9, 0.8 * 175e9, 6144, 0.8 * 6.25e9, 5e-6),
    "TPU v6e": Links(0.8 * 200e9, 0.8 * 87e9, 256, 0.8 * 12.5e9, 5e-6),
    "CPU": Links(5e9, 5e9, 64, 1e9, 50e-6),  # simulated devices copy within the memory
}
# Of devices that are not known: PCIe 4.0 with 16 lanes, and a network card of 100 Gbit/s for each
UNKNOWN_LINKS = Links(0.8 * 32e9, 0.8 * 32e9, 8, 0.8 * 12.5e9, 26e-6)


def links_of(on: Device) -> Links:
    """The links of a device by its name; a careful guess for one that is not known. All CPUs have the same."""
    known = next((links for name, links in LINKS.items() if on.name.startswith(name)), None)
    return known or (LINKS["CPU"] if on.platform == "cpu" else UNKNOWN_LINKS)


class Planned(NamedTuple):
    """A kind of device that need not be here: JAX's name of it, its bytes of memory, and of a GPU the compute capability."""

    kind: str
    memory: int
    capability: str = ""

    @property
    def figures(self) -> Device:
        return DEVICES[self.kind]

    @property
    def links(self) -> Links:
        return links_of(self.figures)


PLANNED = {  # by the name on the command line; memory as the vendors' data sheets have it
    "h100": Planned("NVIDIA H100", 80 * 10**9, "9.0"),
    "h200": Planned("NVIDIA H200", 141 * 10**9, "9.0"),
    "b200": Planned("NVIDIA B200", 180 * 10**9, "10.0"),  # DGX B200: 1,440 GB of eight
    "a100": Planned("NVIDIA A100", 80 * 10**9, "8.0"),
    "v5p": Planned("TPU v5", 95 << 30),
    "v6e": Planned("TPU v6 lite", 32 * 10**9),
}
