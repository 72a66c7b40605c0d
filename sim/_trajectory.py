"""What a simulation returns."""

from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from ..adjoint import Status


class Trajectory(eqx.Module):
    """States at saved times, the final state, and how the run went.

    Attributes
    ----------
    t
        Saved times (K,), in the unit of `t0` and `t1`; `t1` alone without `save_at`.
    y
        States at these times: every leaf has a leading axis of length K. This is the transpose of SciPy's.
    t_final, y_final
        The end of the run, without the leading axis.
    status
        A sentence, `Status.converged` if all went well.
    stats
        `steps`, `rate_evaluations` of one forward run, `iterations` of implicit stages in all.
    """

    t: Float[Array, " K"]
    y: PyTree[Array]
    t_final: Float[Array, ""]
    y_final: PyTree[Array]
    status: Status
    stats: dict[str, Any]

    def __str__(self) -> str:
        """A readable summary; values appear only where they are known."""
        if isinstance(self.t_final, Tracer):
            return f"Trajectory(traced, {self.stats['steps']} steps)"
        sentence = Status[self.status] if jax.numpy.ndim(self.t_final) == 0 else "a batch of runs"
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self.y)
        return (
            f"Trajectory to t = {self.t_final}: {self.stats['steps']} steps, {self.t.shape[-1]} saved times, "
            f"y {shapes}. {sentence}"
        )
