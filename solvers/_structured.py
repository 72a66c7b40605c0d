"""What methods and preconditioners share that work with the nonzeros of an operator."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import equinox as eqx
import jax

from ..adjoint._sparse import Pattern, as_pattern, detect_pattern, nonzeros, pattern_of_matrix


class Structured(eqx.Module):
    """Knows where the nonzeros of A are, and finds their values from products with A, or with Aᵀ if `flipped`."""

    pattern: Any = eqx.field(default=None, static=True, converter=as_pattern)
    flipped: bool = eqx.field(default=False, static=True, repr=False, kw_only=True)

    def for_matrix(self, matrix: Any) -> Self:
        """Take the structure of a matrix whose indices (or dense values) are known while tracing."""
        return self if self.pattern is not None else dataclasses.replace(self, pattern=pattern_of_matrix(matrix))

    def for_function(self, f: Callable[[Any], Any], like: Any) -> Self:
        """Find the structure of f's Jacobian, which the forward, tangent and adjoint solves share."""
        return self if self.pattern is not None else dataclasses.replace(self, pattern=detect_pattern(f, like))

    def transposed(self, like: Any) -> Any:
        """The same for Aᵀ, with the structure of A."""
        del like
        return dataclasses.replace(self, flipped=not self.flipped)

    def nonzeros_of(self, matvec: Callable[[Any], Any], like: Any) -> tuple[Pattern, jax.Array]:
        """The pattern and the nonzeros of A, whose product (that of Aᵀ if `flipped`) is `matvec`."""
        pattern = self.pattern
        if pattern is None:
            found = detect_pattern(matvec, like)
            pattern = found.transposed if self.flipped else found
        if not self.flipped:
            return pattern, nonzeros(matvec, pattern, like)
        return pattern, nonzeros(matvec, pattern.transposed, like)[pattern.from_transposed]
