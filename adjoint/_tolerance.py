"""Tolerances that a dtype can reach."""

import jax.numpy as jnp
from jax.core import Tracer


def resolve_tolerance(
    name: str, value: float | None, default: float, dtype: jnp.dtype, *, reachable: bool = True
) -> float:
    """The tolerance to use: `default` where none is given, scaled to the dtype; an error where it cannot be met.

    `default` is meant for float64; float32 takes its square root, half the digits. An absolute tolerance is
    `reachable` at any size.
    """
    eps = float(jnp.finfo(dtype).eps)
    if value is None:
        return default if eps < 1e-10 else default**0.5
    reach = 4 * eps
    if not isinstance(value, Tracer) and not value >= 0.0:
        message = f"`{name}` must not be negative or NaN, got {value}."
        raise ValueError(message)
    if reachable and not isinstance(value, Tracer) and 0.0 < value < reach:
        message = (
            f"`{name}` must be reachable in {dtype}: expected at least {reach:.1e}, got {value:.1e}. Loosen it, or "
            "switch to float64 at the start of the program: jax.config.update('jax_enable_x64', True)."
        )
        raise ValueError(message)
    return value
