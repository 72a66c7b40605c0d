"""Schedules of checkpointing: values made of plain integers. Imports nothing of the package, and no JAX.

Each is a lazy iterable of actions (advance, store, restore, youturn). It moves no data and knows no solver: loops run
by it, tests replay it, and it draws itself.
"""

from ._actions import Action as Action
from ._actions import Advance as Advance
from ._actions import Restore as Restore
from ._actions import Store as Store
from ._actions import Youturn as Youturn
from ._binomial import binomial as binomial
from ._multistage import multistage as multistage
from ._online import online as online
from ._schedule import Schedule as Schedule
from ._store_all import store_all as store_all
