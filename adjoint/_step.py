"""The step protocol: what a rollout needs to know of one step."""

import abc
from typing import Any

import jax


class Step(abc.ABC):
    """One step x⁺ = Φ(x, inputs) of a rollout, with its discrete adjoint.

    Subclass it when the adjoint of your step can be computed from its two end states, as for one-stage implicit
    steps (implicit Euler, midpoint, Newmark): override `pullback`, and a reverse sweep repeats no solve.

    `inputs` holds whatever the step depends on beside the state (parameters, time, step size), as one pytree.
    """

    @abc.abstractmethod
    def advance(self, x: Any, inputs: Any) -> Any:
        """Return the next state, of the structure, shapes and dtypes of `x`."""

    def pullback(self, x: Any, x_next: Any, inputs: Any, cotangent: Any) -> tuple[Any, Any]:
        """Return `(x_bar, inputs_bar)` = (∂Φ/∂x)ᵀ c, (∂Φ/∂inputs)ᵀ c for the cotangent c of `x_next`.

        The default differentiates `advance` and does not need `x_next`. It is only ever called with the
        `x_next` that `advance(x, inputs)` returned.
        """
        del x_next
        return jax.vjp(self.advance, x, inputs)[1](cotangent)
