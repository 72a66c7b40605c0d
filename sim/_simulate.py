"""`simulate`: from a system and an initial state to a trajectory, as one rollout node."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..adjoint import Status, failed
from ..adjoint._compile import call_compiled
from ..adjoint._guard import guard_tangents
from ..adjoint._status import raise_if_failed
from ..adjoint._trace import as_parameters, as_unknowns, known_value, own, state_dtype
from ..checkpointing._resolve import Checkpoint, resolve_rollout
from ..checkpointing._rollout import Rollout
from ._field import trace_field
from ._grid import Grid, make_grid, make_saves
from ._method import AbstractMethod
from ._stepper import Stepper, clock_of
from ._systems import ODE, SecondOrder
from ._trajectory import Trajectory

System = ODE | SecondOrder | Callable[[Any, Any, Any], Any]


def simulate(
    system: System,
    y0: PyTree[Any],
    params: PyTree[Any] = None,
    *,
    t0: float,
    t1: float,
    dt: float,
    method: AbstractMethod,
    save_at: Float[Array, " K"] | None = None,
    checkpoint: Checkpoint = None,
    throw: bool = True,
) -> Trajectory:
    """Integrate a system from `t0` to `t1` in steps of `dt`; the result is differentiable in every mode.

    The gradient is the exact derivative of the numbers computed (the discrete adjoint), with respect to `y0`,
    `params`, everything the system closes over, `t0`, `t1`, `dt` and `save_at`.

    Parameters
    ----------
    system
        `ODE(rate)`, `SecondOrder(acceleration)`, or a function `rate(t, y, params)`.
    y0
        Initial state, any pytree of numbers; integers become the default float. The state keeps its dtype: what
        the system returns is converted to it.
    params
        Any pytree. Floating-point leaves get gradients; integers, `None`, strings and functions are carried.
    t0, t1
        Start and end of the run, in the system's unit of time. t1 < t0 runs backwards.
    dt
        Step size, in the same unit, with the sign of t1 - t0. If it does not divide the span, the last step is
        shorter (the number of steps is fixed when a gradient is taken).
    method
        `RK4()`, `DormandPrince8()`, `VelocityVerlet()`, `KahanLi8()` or `ImplicitMidpoint()`.
    save_at
        Times (K,) within the span whose states are returned, in any order, repeats allowed. A time between grid
        points is reached by one shorter step from the grid point before it, at the full order of the method.
    checkpoint
        Number of states that the gradient may hold at once, or a schedule; see `checkpointing.scan`.
    throw
        Whether a failure raises `adjoint.SolveError`; otherwise look at `.status`.

    Returns
    -------
    Trajectory
        `.t`, `.y` (leading axis of saved times, of the final state alone without `save_at`), `.t_final`,
        `.y_final`, `.status`, `.stats`.

    Raises
    ------
    ValueError, TypeError
        Shapes, structure or numbers do not fit; the text says what was expected, what came, and what to do.
    adjoint.SolveError
        The run failed and `throw` is true, or its derivative was asked for though it failed.

    Notes
    -----
    No adaptive steps, events or stiff methods of higher order yet; no stochastic and no delay equations.

    Examples
    --------
    >>> import jax
    >>> from tapeless import sim
    >>> def final(k):
    ...     run = sim.simulate(sim.ODE(lambda t, y, k: -k * y), 1.0, k, t0=0, t1=1, dt=0.01, method=sim.RK4())
    ...     return run.y_final
    >>> round(float(jax.grad(final)(0.5)), 4)
    -0.6065

    References
    ----------
    Hager, "Runge-Kutta methods in optimal control and the transformed adjoint system", Numer. Math. 87 (2000),
    doi:10.1007/s002110000178, for discrete adjoints.
    """
    _check_arguments(system, method)
    system = system if isinstance(system, ODE | SecondOrder) else ODE(system)
    y0 = as_unknowns(y0)
    dtype = state_dtype(y0)
    _check_state(system, y0)
    grid = make_grid(t0, t1, dt)
    saves = None if save_at is None else make_saves(save_at, grid)
    params = as_parameters(params, dtype)
    clock = tuple(map(_as_clock, (grid.t0, grid.span, grid.dt)))
    arrays = None
    if saves is not None:
        arrays = (_as_clock(saves.times), saves.steps, saves.rows, saves.row_of_save)
    t, y, t_final, y_final, status, iterations = call_compiled(
        _simulate,
        (system, y0, params, clock, arrays),
        method=method.resolve(dtype),
        n=grid.n,
        num_rows=0 if saves is None else saves.num_rows,
        between=saves is not None and saves.between,
        checkpoint=checkpoint,
    )
    if throw:
        y, y_final = raise_if_failed((y, y_final), status, "simulate")
    y, y_final = guard_tangents((y, y_final), status, "simulate")
    stats = {"steps": grid.n, "rate_evaluations": grid.n * method.stages, "iterations": iterations}
    return Trajectory(t, y, t_final, y_final, status, stats)


def _check_arguments(system: Any, method: Any) -> None:
    function = getattr(system, "rate", None) or getattr(system, "acceleration", None) or system
    if not callable(function):
        message = f"`system` must be a function rate(t, y, params), sim.ODE or sim.SecondOrder, got {system!r}."
        raise TypeError(message)
    if not isinstance(method, AbstractMethod):
        message = f"`method` must be an instance such as sim.RK4(), got {method!r}."
        raise TypeError(message)


def _as_clock(x: Any) -> jax.Array:
    return jnp.asarray(own(x), jnp.result_type(float))


def _check_state(system: Any, y0: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(y0):
        value = known_value(leaf)
        if value is not None and not np.all(np.isfinite(value)):
            where = jax.tree_util.keystr(path) or "it"
            message = (
                f"`y0` must be finite, but {where} holds NaN or infinity. Check where the initial state comes from."
            )
            raise ValueError(message)
    if isinstance(system, SecondOrder):
        pair = isinstance(y0, tuple | list) and len(y0) == 2
        if not pair or jax.tree.map(jnp.shape, y0[0]) != jax.tree.map(jnp.shape, y0[1]):
            shapes = jax.tree.map(jnp.shape, y0)
            message = (
                "`y0` of a SecondOrder system must be a pair (q, v) of the same structure and shapes, got shapes "
                f"{shapes}. Pass positions and velocities separately, as y0=(q0, v0)."
            )
            raise ValueError(message)


def _simulate(
    system: Any,
    y0: Any,
    params: Any,
    clock: Any,
    saves: Any,
    *,
    method: AbstractMethod,
    n: int,
    num_rows: int,
    between: bool,
    checkpoint: Checkpoint,
) -> Any:
    grid = Grid(n, *clock)
    field, y0 = trace_field(system, method, grid.t0, y0, params)
    memory = method.begin(field.fill(), clock_of(grid.t0, y0), y0)
    stepper = Stepper(method, field, n, y0, memory, saving=num_rows > 0)
    consts = [*field.consts, *field.leaves, *clock]
    carry = stepper.pack(y0, memory, stepper.fresh_report())
    ys: list[Any] = []
    if n > 0:
        rows = jnp.asarray(saves[2]) if num_rows else None
        pullback = stepper.rollout_pullback if method.has_pullback else None
        rollout = Rollout(stepper.rollout_step, n, 1, num_rows=num_rows, pullback=pullback)
        xs = [jnp.arange(n, dtype=jnp.int32)]
        rollout = resolve_rollout(rollout, checkpoint, consts, carry, xs)
        carry, ys = rollout(consts, carry, xs, rows)
    y_final, _, (status, iterations) = stepper.unpack(carry)
    t_final = grid.t0 + grid.span
    if saves is None:
        t, y = t_final[None], jax.tree.map(lambda x: x[None], y_final)
    else:
        rows_of_y = jax.tree.unflatten(jax.tree.structure(y0), ys) if ys else None
        t = saves[0]
        y, partial = _saved(stepper, grid, y0, rows_of_y, saves, between)
        status = Status.where(failed(status), status, partial)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((y, y_final))] + [True]))
    status = Status.where(failed(status) | finite, status, Status.nonfinite)
    return t, y, t_final, y_final, status, iterations


def _saved(stepper: Stepper, grid: Grid, y0: Any, rows: Any, saves: Any, between: bool) -> tuple[Any, Status]:
    """States at the save times, from the rows of grid points, and the first bad status of the steps in between."""
    times, steps, _, row_of_save = saves

    def gather(y0: Any, rows: Any) -> Any:
        return jnp.concatenate([y0[None], rows])[row_of_save]

    if rows is None:
        y = jax.tree.map(lambda y0: jnp.broadcast_to(y0[None], (times.shape[0], *y0.shape)), y0)
    else:
        y = jax.tree.map(gather, y0, rows)
    if not between or times.shape[0] == 0:
        return y, Status.converged
    starts = jnp.where(steps == grid.n, grid.t0 + grid.span, grid.t0 + steps * grid.dt)
    y, statuses = jax.vmap(stepper.partial)(starts, times - starts, y)
    codes = jax.tree.leaves(statuses)[0]
    first = jnp.argmax(failed(statuses))
    return y, jax.tree.unflatten(jax.tree.structure(statuses), [codes[first]])
