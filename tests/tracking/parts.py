"""Parts of a regressor's state, for tests of how they move."""

from opvi.tracking._inside import find
from opvi.tracking._mixing._numbers import NumbersState
from opvi.tracking._mixing._stacking import StackState
from opvi.tracking._wrappers._units import UnitsState
from opvi.tracking.experts._networks import NetworksState


def nets(state):
    return find(state, NetworksState)


def units(state):
    return find(state, UnitsState)


def head(state):
    return find(state, NumbersState)


def stack(state):
    return find(state, StackState)
