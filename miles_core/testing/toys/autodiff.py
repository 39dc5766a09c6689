"""Reverse-mode differentiation of NumPy expressions, small enough to read: what lets toy terms be written as formulas.

`Var` behaves like a float64 array under the operators and under the NumPy functions that losses need (`exp`, `log`,
`maximum`, `minimum`, `where`, `clip`, `sum`, …); anything else raises `TypeError` instead of losing a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Vjp = Callable[[Array], Array]


def _fit(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Undo broadcasting: sum `gradient` to `shape`."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    for axis, size in enumerate(shape):
        if size == 1 and gradient.shape[axis] != 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
    return gradient


def value_of(x: Any) -> Array:
    """The plain float64 array of `x`, which may be a `Var`."""
    return x.value if isinstance(x, Var) else np.asarray(x, dtype=np.float64)


class _Detached(np.ndarray):
    """What `Var.detach` returns: an array with the one tensor method that tensor-agnostic code asks of it."""

    def double(self) -> Array:
        return self.view(np.ndarray).astype(np.float64)


class Var:
    """A float64 array that remembers how it was computed. `grad` is filled by `backward()` of something above it."""

    def __init__(self, value: Any, parents: Sequence[tuple[Var, Vjp]] = ()) -> None:
        self.value: Array = np.asarray(value, dtype=np.float64)
        self.parents = tuple(parents)
        self.grad: Array | None = None

    # --- like an array -----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    def __len__(self) -> int:
        return len(self.value)

    @property
    def ndim(self) -> int:
        return self.value.ndim

    def detach(self) -> Array:
        """The value as a plain array, without history."""
        return self.value.view(_Detached)

    def is_floating_point(self) -> bool:
        return True

    def masked_fill(self, mask: Any, value: float) -> Var:
        """`value` where `mask`; the gradient is selected too."""
        return where(~np.asarray(mask, bool), self, value)

    def __getitem__(self, index: Any) -> Var:
        def back(g: Array) -> Array:
            full = np.zeros_like(self.value)
            np.add.at(full, index, g)
            return full

        return Var(self.value[index], [(self, back)])

    def sum(self) -> Var:
        return Var(self.value.sum(), [(self, lambda g: np.broadcast_to(g, self.shape))])

    def clip(self, low: Any = None, high: Any = None) -> Var:
        inside = np.ones(self.shape, bool)
        if low is not None:
            inside &= self.value >= low
        if high is not None:
            inside &= self.value <= high
        return Var(np.clip(self.value, low, high), [(self, lambda g: np.where(inside, g, 0.0))])

    # --- operators ---------------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Var:
        return _binary(self, other, np.add, lambda g, a, b: g, lambda g, a, b: g)

    def __sub__(self, other: Any) -> Var:
        return _binary(self, other, np.subtract, lambda g, a, b: g, lambda g, a, b: -g)

    def __rsub__(self, other: Any) -> Var:
        return _binary(-self, other, np.add, lambda g, a, b: g, lambda g, a, b: g)

    def __mul__(self, other: Any) -> Var:
        return _binary(self, other, np.multiply, lambda g, a, b: g * b, lambda g, a, b: g * a)

    def __truediv__(self, other: Any) -> Var:
        return _binary(self, other, np.divide, lambda g, a, b: g / b, lambda g, a, b: -g * a / (b * b))

    def __rtruediv__(self, other: Any) -> Var:
        return Var(other) / self

    def __pow__(self, power: float) -> Var:
        return Var(self.value**power, [(self, lambda g: g * power * self.value ** (power - 1))])

    def __neg__(self) -> Var:
        return Var(-self.value, [(self, lambda g: -g)])

    __radd__ = __add__
    __rmul__ = __mul__

    def __lt__(self, other: Any) -> Array:
        return np.less(self.value, value_of(other))

    def __gt__(self, other: Any) -> Array:
        return np.greater(self.value, value_of(other))

    # --- NumPy functions ---------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        rule = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or kwargs or rule is None:
            raise TypeError(f"Var does not know np.{ufunc.__name__}; add its derivative to _UFUNCS")
        return rule(*inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is np.where:
            return where(*args)
        if func is np.sum and len(args) == 1 and not kwargs:
            return args[0].sum()
        if func is np.clip:
            return args[0].clip(*args[1:], **kwargs)
        if func in (np.zeros_like, np.ones_like):
            return func(value_of(args[0]), **kwargs)
        raise TypeError(f"Var does not know np.{func.__name__}")

    # --- differentiation ---------------------------------------------------------------------------------------------

    def backward(self, gradient: Any = 1.0) -> None:
        """Add d(self · gradient) to `grad` of everything that this was computed from."""
        order: list[Var] = []
        seen: set[int] = set()
        stack: list[tuple[Var, bool]] = [(self, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend((parent, False) for parent, _ in node.parents)
        pending = {id(self): np.broadcast_to(np.asarray(gradient, np.float64), self.shape)}
        for node in reversed(order):
            g = pending.pop(id(node), None)
            if g is None:
                continue
            if not node.parents:
                node.grad = g.copy() if node.grad is None else node.grad + g
            for parent, vjp in node.parents:
                part = vjp(g)
                pending[id(parent)] = pending[id(parent)] + part if id(parent) in pending else part


def _binary(a: Any, b: Any, function: Any, da: Any, db: Any) -> Var:
    x, y = value_of(a), value_of(b)
    parents: list[tuple[Var, Vjp]] = []
    if isinstance(a, Var):
        parents.append((a, lambda g: _fit(da(g, x, y), x.shape)))
    if isinstance(b, Var):
        parents.append((b, lambda g: _fit(db(g, x, y), y.shape)))
    return Var(function(x, y), parents)


def _unary(function: Any, derivative: Callable[[Array, Array], Array]) -> Callable[[Var], Var]:
    def apply(x: Var) -> Var:
        y = function(x.value)
        return Var(y, [(x, lambda g: g * derivative(x.value, y))])

    return apply


def where(condition: Any, a: Any, b: Any) -> Var:
    """`np.where` with gradients to both branches, each only where it was taken."""
    mask = np.asarray(value_of(condition), bool)
    return _binary(a, b, lambda x, y: np.where(mask, x, y), lambda g, *_: g * mask, lambda g, *_: g * ~mask)


def _extremum(function: Any, first_wins: Any) -> Callable[[Any, Any], Var]:
    def apply(a: Any, b: Any) -> Var:
        x, y = value_of(a), value_of(b)
        mine = first_wins(x, y)
        return _binary(a, b, function, lambda g, *_: g * mine, lambda g, *_: g * ~mine)

    return apply


_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: b + a if isinstance(b, Var) else a + b,
    "subtract": lambda a, b: -b + a if isinstance(b, Var) and not isinstance(a, Var) else a - b,
    "multiply": lambda a, b: b * a if isinstance(b, Var) else a * b,
    "divide": lambda a, b: (a if isinstance(a, Var) else Var(a)) / b,
    "negative": lambda a: -a,
    "exp": _unary(np.exp, lambda x, y: y),
    "log": _unary(np.log, lambda x, y: 1.0 / x),
    "sqrt": _unary(np.sqrt, lambda x, y: 0.5 / y),
    "square": _unary(np.square, lambda x, y: 2.0 * x),
    "tanh": _unary(np.tanh, lambda x, y: 1.0 - y * y),
    "absolute": _unary(np.abs, lambda x, y: np.sign(x)),
    "maximum": _extremum(np.maximum, np.greater_equal),
    "minimum": _extremum(np.minimum, np.less_equal),
    "less": lambda a, b: np.less(value_of(a), value_of(b)),
    "greater": lambda a, b: np.greater(value_of(a), value_of(b)),
    "isfinite": lambda a: np.isfinite(value_of(a)),
}
