"""Whether experts can be computed on the CPU here, and with which instructions. No JAX here."""

from mla_jax.base.errors import Unsupported


def instructions() -> str:
    """The best instruction set that the library can use: amx, avx512, avx2 or portable. Raises Unsupported without it."""
    import cpu_experts

    try:
        return cpu_experts.isa()
    except cpu_experts.Unsupported as e:
        raise Unsupported(str(e)) from e


def refuse_without_programs() -> None:
    """Raises Unsupported where the library for XLA programs is missing; imports no JAX, which may be hidden or broken."""
    import cpu_experts
    from cpu_experts.library import load_ffi

    try:
        load_ffi()
    except cpu_experts.Unsupported as e:
        raise Unsupported(str(e)) from e


def notes() -> tuple[str, ...]:
    """Notes for a user of experts on this CPU."""
    from cpu_experts import note

    found = note()
    return () if found is None else (found,)


def precisions() -> tuple[str, ...]:
    """The number formats that experts can be packed in."""
    from cpu_experts.layout import FORMATS

    return tuple(FORMATS)
