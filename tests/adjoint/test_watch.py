"""Watching solves: what is collected, where, and how it prints."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import max_error
from tapeless import adjoint, solvers

A = np.diag([1.0, 2.0, 3.0, 4.0]) + np.diag([0.3, 0.2, 0.1], 1)
B = np.array([1.0, -2.0, 0.5, 3.0])
METHOD = solvers.GMRES(rtol=1e-10)


def solve(b: Any, **options: Any) -> Any:
    return solvers.linear_solve(A, b, METHOD, **options).value


@jax.jit
def both_ways(b: Any, db: Any) -> Any:
    tangent = jax.jvp(solve, (b,), (db,))[1]
    return jax.grad(lambda b: jnp.sum(solve(b) ** 2))(b), tangent


def test_kinds_counts_and_residuals() -> None:
    """Assert one record a solve, true residuals, and that a function compiled before is watched, and not after."""
    quiet = both_ways(B, B[::-1])
    with adjoint.watch_solves() as log:
        watched = both_ways(B, B[::-1])
    assert max_error(watched, quiet) == 0.0
    assert sorted(record.kind for record in log) == ["adjoint", "forward", "forward", "tangent"]
    for record in log:
        assert (record.method, record.iterations, record.converged) == ("GMRES", 4, True)
        assert 0 <= record.residual <= 1e-10 * 100
    assert len(log.of("forward")) == 2
    both_ways(2 * B, B)
    jax.effects_barrier()
    assert len(log) == 4
    with adjoint.watch_solves() as again:
        both_ways(2 * B, B)
    assert (len(log), len(again)) == (4, 4)


def test_residuals_are_those_of_the_values() -> None:
    """Assert that a solve that was stopped reports its residual and its sentence, and the stats say the same."""
    with adjoint.watch_solves() as log:
        found = solvers.linear_solve(A, B, solvers.GMRES(rtol=1e-10, max_iters=2), throw=False)
    (record,) = log
    assert record.residual == pytest.approx(np.linalg.norm(B - A @ found.value), rel=1e-12)
    assert (record.iterations, record.residual) == (2, float(found.stats["residual"]))
    assert not record.converged
    assert record.status == adjoint.Status[adjoint.Status.max_iterations]


def test_lanes_are_records() -> None:
    """Assert one record a lane under vmap, with counts of its own, forward and adjoint."""
    lanes = np.stack([np.zeros(4), np.eye(4)[0], B])
    gradient = jax.jit(jax.vmap(jax.grad(lambda b: jnp.sum(solve(b) ** 2))))
    with adjoint.watch_solves() as log:
        gradient(lanes)
    assert sorted(r.iterations for r in log.of("forward")) == [0, 1, 4]
    assert len(log.of("adjoint")) == 3
    assert len(log) == 6


def test_nesting_and_threads() -> None:
    """Assert that an inner log holds its own solves and the outer one all, other threads and failures included."""

    def other() -> None:
        solvers.linear_solve(A, B)

    with adjoint.watch_solves() as outer:
        solve(B)
        with adjoint.watch_solves() as inner:
            solve(2 * B)
            solve(3 * B)
        with pytest.raises(adjoint.SolveError), adjoint.watch_solves() as broken:
            solvers.linear_solve(A, B, solvers.GMRES(max_iters=1))
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    solve(B)
    jax.effects_barrier()
    assert (len(outer), len(inner), len(broken)) == (5, 2, 1)
    assert [record.method for record in outer] == ["GMRES"] * 4 + ["LU"]


def test_the_table() -> None:
    """Assert that a log prints as aligned columns, blank where a method does not count, in define-by-run mode too."""
    with adjoint.watch_solves() as log:
        assert str(log).split() == ["kind", "method", "iterations", "residual", "status"]
        solve(0 * B)
        solvers.linear_solve(A, B)
        with jax.disable_jit():
            solvers.root_find(lambda u, p: u**2 - p, 1.0, 2.0)
    head, *rows = str(log).splitlines()
    start = head.index("status")
    assert {row[start:] for row in rows} == {"Converged."}
    assert [row[:start].split() for row in rows[:2]] == [["forward", "GMRES", "0", "0.00e+00"], ["forward", "LU"]]
    assert rows[2].split()[:2] == ["forward", "Newton"]
    assert log[1].iterations is None
    assert log[1].residual is None
