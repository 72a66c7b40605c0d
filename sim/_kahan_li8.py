"""Kahan and Li's symmetric composition of order 8."""

from typing import Any, ClassVar

import jax
import numpy as np

from ._method import AbstractMethod, Field, StepResult, add_scaled, explicit_result

_HALF = (
    0.13020248308889008087881763,
    0.56116298177510838456196441,
    -0.38947496264484728640807860,
    0.15884190655515560089621075,
    -0.39590389413323757733623154,
    0.18453964097831570709183254,
    0.25837438768632204729397911,
    0.29501172360931029887096624,
)
_MIDDLE = -0.60550853383003451169892108
_GAMMA = np.array([*_HALF, _MIDDLE, *reversed(_HALF)])


class KahanLi8(AbstractMethod):
    """Kahan and Li's composition of 17 leapfrog steps, symplectic and symmetric, order 8.

    The choice for long orbits at high accuracy: the error in the energy stays bounded, and errors in position grow
    linearly in time rather than quadratically. For `SecondOrder` systems whose acceleration does not depend on
    velocities. Each of the 17 parts, of length γᵢ h, is drift-kick-drift with one evaluation.

    Some parts run backwards in time: the acceleration is evaluated up to 0.6 h outside the step.

    Source: Kahan and Li, "Composition constants for raising the orders of unconventional schemes for ordinary
    differential equations", Math. Comp. 66 (1997), scheme s17odr8a, doi:10.1090/S0025-5718-97-00873-9.
    """

    order: ClassVar[int] = 8
    stages: ClassVar[int] = 17
    needs_acceleration: ClassVar[bool] = True

    def step(self, field: Field, t: jax.Array, dt: jax.Array, y: Any, memory: Any) -> StepResult:
        """Drift, kick, drift, ..., with neighbouring drifts merged."""
        del memory
        q, v = y
        drifts = np.append(_GAMMA, 0) / 2 + np.append(0, _GAMMA) / 2
        times = np.cumsum(drifts)
        for drift, kick, c in zip(drifts, _GAMMA, times, strict=False):
            q = add_scaled(q, dt * drift, v)
            v = add_scaled(v, dt * kick, field.acceleration(t + dt * c, q))
        return explicit_result((add_scaled(q, dt * drifts[-1], v), v))
