"""The velocity form of Verlet's method."""

from typing import Any, ClassVar

import jax

from ._method import AbstractMethod, Field, StepResult, add_scaled, explicit_result


class VelocityVerlet(AbstractMethod):
    """Velocity Verlet (kick-drift-kick leapfrog), symplectic, order 2, one evaluation a step.

    The choice for long runs of many particles at moderate accuracy: the error in the energy stays bounded. For
    `SecondOrder` systems whose acceleration does not depend on velocities.

        v½ = vₙ + h/2 a(tₙ, qₙ),   qₙ₊₁ = qₙ + h v½,   vₙ₊₁ = v½ + h/2 a(tₙ₊₁, qₙ₊₁)

    Stable for h ω < 2. The acceleration at the end of a step is kept for the next one.

    Source: Hairer, Lubich and Wanner, *Geometric Numerical Integration*, 2nd ed., eq. (I.1.17),
    doi:10.1007/3-540-30666-8.
    """

    order: ClassVar[int] = 2
    stages: ClassVar[int] = 1
    needs_acceleration: ClassVar[bool] = True

    def begin(self, field: Field, t: jax.Array, y: Any) -> Any:
        """The first acceleration."""
        return field.acceleration(t, y[0])

    def step(self, field: Field, t: jax.Array, dt: jax.Array, y: Any, memory: Any) -> StepResult:
        """Kick, drift, kick."""
        q, v = y
        v = add_scaled(v, dt / 2, memory)
        q = add_scaled(q, dt, v)
        a = field.acceleration(t + dt, q)
        return explicit_result((q, add_scaled(v, dt / 2, a)), a)
