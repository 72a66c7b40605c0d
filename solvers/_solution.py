"""What a solve returns."""

from typing import Any

import equinox as eqx

from ..adjoint import Status


class Solution(eqx.Module):
    """The result of a solve: `value`, `status` (a sentence), `stats` (counts and residuals) and a user's `aux`."""

    value: Any
    status: Status
    stats: dict[str, Any]
    aux: Any = None
