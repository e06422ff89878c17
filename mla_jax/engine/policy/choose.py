"""The cache policy that options and the model ask for."""

from mla_jax.base.options import EvictOptions
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicting import Evicting, Eviction
from mla_jax.engine.policy.retrieving import Retrieving


def policy_of(programs: Programs, size: Size, evict: EvictOptions) -> CachePolicy:
    """One policy for all requests of an engine."""
    eviction = Eviction.of(evict)
    if eviction is not None:
        return Evicting(programs, size, eviction)
    if programs.model.dispatch.retrieval is not None:
        return Retrieving(programs, size)
    return CachePolicy(programs, size)
