# SPDX-License-Identifier: Apache-2.0
"""The two tables behind the tensor subclasses, and what may be done without an entry in them.

`functions.py` fills FUNCTIONS (torch functions, above autograd: the hot path), `operators.py` fills
OPS (operators, below autograd). stowed.py and views.py only look up, so that neither imports them.
What all modules of the process must know of resting weights, torch is told with the first weight:
a program that only imports the package is left as it was.
"""

import threading
from collections.abc import Callable
from typing import Any

from stowage._ops.eager import eagerly
from stowage._ops.errors import translated

Handler = Callable[..., Any]

FUNCTIONS: dict[Any, Handler] = {}  # called as the function itself; may return NotImplemented
OPS: dict[Any, Handler] = {}  # called with (op, args, kwargs); may return NotImplemented
ROW_OPS: dict[Any, Handler] = {}  # the same, of rows that are spread over processes (_shard/)
unregistered: list[Callable[[], object]] = []  # what torch is told with the first weight
_registering = threading.Lock()
_DEFAULT = "default"


def function(*keys: Any) -> Callable[[Handler], Handler]:
    """Enters a handler for torch functions and methods."""

    def enter(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(keys, handler))
        return handler

    return enter


def op(*keys: Any) -> Callable[[Handler], Handler]:
    """Enters a handler for operators; without a key, for every operator that has none."""

    def enter(handler: Handler) -> Handler:
        OPS.update(dict.fromkeys(keys or (_DEFAULT,), handler))
        return handler

    return enter


def earlier_op(*keys: Any) -> Callable[[Handler], Handler]:
    """As `op`, asked before the handlers that these operators have, which run if it declines."""

    def enter(handler: Handler) -> Handler:
        OPS.update({key: _either(handler, OPS.get(key)) for key in keys})
        return handler

    return enter


def _either(first: Handler, second: Handler | None) -> Handler:
    def call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = first(called, args, kwargs)
        if result is NotImplemented and second is not None:
            return second(called, args, kwargs)
        return result

    return call


def row_op(*keys: Any) -> Callable[[Handler], Handler]:
    """As `op`, for rows that are spread over processes; takes names of operators, too, which a
    later import defines."""

    def enter(handler: Handler) -> Handler:
        ROW_OPS.update(dict.fromkeys(keys or (_DEFAULT,), handler))
        return handler

    return enter


def with_first_weight(entry: Callable[[], object]) -> Callable[[], object]:
    """Enters what is called once, before there is a weight in this process."""
    unregistered.append(entry)
    return entry


def register() -> None:
    """Calls all that was entered; whoever makes a weight does so if `unregistered` is not empty."""
    with _registering:
        while unregistered:
            unregistered[0]()
            del unregistered[0]


def dispatch(
    called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], table: dict[Any, Handler] = OPS
) -> Any:
    """Runs an operator that was given a stowed tensor, a view of one, or rows of one."""
    return eagerly(_dispatch, called, args, kwargs, table)


def _dispatch(
    called: Any, args: tuple[Any, ...], kwargs: dict[str, Any], table: dict[Any, Handler]
) -> Any:
    try:
        handler = table.get(called)
        if handler is not None:
            result = handler(called, args, kwargs)
            if result is not NotImplemented:
                return result
        return table[_DEFAULT](called, args, kwargs)
    except RuntimeError as error:
        raise translated(error) from None
