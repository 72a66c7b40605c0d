"""Drawing a schedule (placeholder for the helper)."""


def draw(schedule, axes=None):
    raise NotImplementedError
