"""Numbers of bytes, as people write them."""

import re

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def as_bytes(name: str, size: object) -> int:
    """A positive number of bytes, given as one or with a unit."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if match and match[2] in _UNITS:
        try:
            value = int(float(match[1]) * _UNITS[match[2]])
        except (OverflowError, ValueError):
            value = 0
        if value > 0:
            return value
    message = f"`{name}` must be a positive number of bytes, or one with a unit ({', '.join(_UNITS)}); got {size!r}."
    raise ValueError(message)
