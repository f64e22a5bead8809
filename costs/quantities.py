"""Numbers that remember how they came about, so that a plan can be explained by the computation
that made it.

While `recording()` is on, a formula that meets a Quantity gives a Quantity: its value, the
operation and the terms it was made of. `explained` gives results of a formula their name, unit,
meaning and source, from the formula itself. While it is off, formulas take and give plain numbers.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: dict[str, Callable[..., float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
    "max": max,
    "min": min,
    "ceil": math.ceil,
    "floor": math.floor,
    "log": math.log,
    "exp": math.exp,
}
"""What terms can be combined by; `=` is a quantity that is another one, none an input."""
SAME = {("+", 0): (0, 1), ("-", 0): (1,), ("*", 1): (0, 1), ("/", 1): (1,), ("//", 1): ()}
"""(operation, number) -> at which places that number changes nothing."""


PAPER = re.compile(
    r"arXiv \d{4}\.\d{4,5}"
    r"(?: (?:section|table|figure|appendix|equation) \S+?(?=[\s,;:)]|\.\s|\.?$))?"
)
"""A paper that a docstring names, with the place in it."""


class Quantity(float):
    """A number with the operation and the terms that it was made of."""

    __slots__ = ("meaning", "name", "operation", "source", "terms", "unit")

    name: str
    unit: str
    meaning: str
    source: str
    operation: str
    """One of OPERATIONS, `=`, or empty for an input and a constant."""
    terms: tuple[float, ...]

    def __new__(
        cls, value: float, operation: str = "", terms: tuple[float, ...] = ()
    ) -> "Quantity":
        made = super().__new__(cls, value)
        made.operation, made.terms = operation, terms
        made.name = made.unit = made.meaning = made.source = ""
        return made

    @property
    def is_input(self) -> bool:
        """Whether it came from outside: no formula made it, and none gave it as a constant."""
        return bool(self.name) and not self.operation and not self.meaning

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantity":
        return self

    def __add__(self, other: float) -> float:
        return combined("+", self, other)

    def __radd__(self, other: float) -> float:
        return combined("+", other, self)

    def __sub__(self, other: float) -> float:
        return combined("-", self, other)

    def __rsub__(self, other: float) -> float:
        return combined("-", other, self)

    def __mul__(self, other: float) -> float:
        return combined("*", self, other)

    def __rmul__(self, other: float) -> float:
        return combined("*", other, self)

    def __truediv__(self, other: float) -> float:
        return combined("/", self, other)

    def __rtruediv__(self, other: float) -> float:
        return combined("/", other, self)

    def __floordiv__(self, other: float) -> float:
        return combined("//", self, other)

    def __rfloordiv__(self, other: float) -> float:
        return combined("//", other, self)

    def __mod__(self, other: float) -> float:
        return combined("%", self, other)

    def __rmod__(self, other: float) -> float:
        return combined("%", other, self)

    def __pow__(self, other: float) -> float:  # type: ignore[override]
        return combined("**", self, other)

    def __rpow__(self, other: float) -> float:  # type: ignore[override]
        return combined("**", other, self)

    def __ceil__(self) -> int:
        return cast("int", applied("ceil", self))

    def __floor__(self) -> int:
        return cast("int", applied("floor", self))


def applied(operation: str, *terms: float) -> float:
    """The result of an operation, as a Quantity."""
    return Quantity(OPERATIONS[operation](*(float(term) for term in terms)), operation, terms)


def combined(operation: str, first: float, second: float) -> float:
    """The result of an operation on two numbers of which one is a Quantity; a plain number that
    changes nothing, or makes all of it zero, leaves no trace.
    """
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return NotImplemented
    for place, (constant, other) in enumerate(((first, second), (second, first))):
        if not isinstance(constant, Quantity):
            if place in SAME.get((operation, int(constant) if constant in (0, 1) else -1), ()):
                return other
            if constant == 0 and (operation == "*" or (operation == "/" and place == 0)):
                return 0.0
    return applied(operation, first, second)


_recording = False


@contextmanager
def recording() -> Iterator[None]:
    """Formulas name what they give, meanwhile."""
    global _recording
    before, _recording = _recording, True
    try:
        yield
    finally:
        _recording = before


def explained(
    unit: str = "", *names: str, **fields: str
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A formula whose result is named after it while quantities are recorded.

    unit    of a number, and of every value of a mapping
    names   of the values of a plain tuple
    fields  field of a named tuple -> its unit; fields that are not numbers are left out

    Meaning and source are those of the formula's own docstring.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found = function(*args, **kwargs)
            return cast("R", _of(found, function, unit, names, fields)) if _recording else found

        return call

    return decorate


def _of(
    found: Any,
    function: Callable[..., Any],
    unit: str,
    names: Sequence[str],
    fields: dict[str, str],
) -> Any:
    own = function.__name__.strip("_")
    if isinstance(found, int | float):
        return named(found, own, unit, function)
    if isinstance(found, dict):
        return {key: named(value, f"{own}.{key}", unit, function) for key, value in found.items()}
    if fields:
        return found._replace(
            **{
                field: named(getattr(found, field), f"{own}.{field}", each, function)
                for field, each in fields.items()
            }
        )
    return tuple(
        named(value, f"{own}.{name}", unit, function)
        for name, value in zip(names, found, strict=True)
    )


def named(value: float, name: str, unit: str, function: Callable[..., Any]) -> float:
    """`value` under a name; zero and truth values need none."""
    if isinstance(value, bool) or (not isinstance(value, Quantity) and not value):
        return value
    if not isinstance(value, Quantity):
        value = Quantity(value)
    elif value.name:
        value = Quantity(value, "=", (value,))
    value.name, value.unit = name, unit
    text = " ".join((function.__doc__ or "").split())
    value.meaning = re.split(r"(?<=[.:;]) ", text, maxsplit=1)[0].rstrip(".:;")
    place = function.__module__.replace(".", "/") + ".py"
    papers = re.findall(PAPER, text)
    value.source = "; ".join((f"{place} {function.__name__}", *dict.fromkeys(papers)))
    return value


def maximum(*values: float) -> float:
    """The largest, with all that it was chosen from."""
    return _chosen("max", values)


def minimum(*values: float) -> float:
    """The smallest, with all that it was chosen from."""
    return _chosen("min", values)


def _chosen(operation: str, values: tuple[float, ...]) -> float:
    if any(isinstance(value, Quantity) for value in values):
        return applied(operation, *values)
    return OPERATIONS[operation](*values)


def log(value: float) -> float:
    """The natural logarithm."""
    return applied("log", value) if isinstance(value, Quantity) else math.log(value)


def exp(value: float) -> float:
    """e to the power of `value`."""
    return applied("exp", value) if isinstance(value, Quantity) else math.exp(value)


# ---------------------------------------------------------------- what was recorded, in words

BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 3}


def steps(root: Quantity) -> list[Quantity]:
    """The named quantities that `root` was made of directly, each once, in order."""
    found: dict[int, Quantity] = {}
    stack: list[float] = list(reversed(root.terms))
    while stack:
        term = stack.pop()
        if not isinstance(term, Quantity):
            continue
        if term.name:
            found.setdefault(id(term), term)
        else:
            stack += reversed(term.terms)
    return list(found.values())


def formula(root: Quantity, label: Callable[[Quantity], str]) -> str:
    """How the value of `root` follows from its steps, in Python's notation."""
    return _written(root, label, top=True)[0] if root.operation else ""


def _written(value: float, label: Callable[[Quantity], str], top: bool = False) -> tuple[str, int]:
    """(text, how tightly its last operation binds)."""
    if not isinstance(value, Quantity):
        return _number(value), 4 if value >= 0 else 0
    if value.name and not top:
        return label(value), 4
    if not value.operation:
        return _number(value), 4 if value >= 0 else 0
    if value.operation == "=":
        return _written(value.terms[0], label)
    if value.operation not in BINDS:
        inner = ", ".join(_written(term, label)[0] for term in value.terms)
        return f"{value.operation}({inner})", 4
    binds = BINDS[value.operation]
    (first, of_first), (second, of_second) = (_written(term, label) for term in value.terms)
    if of_first < binds or (of_first == binds and value.operation == "**"):
        first = f"({first})"
    # + and * are written without: their terms may be added up from the left all the same
    alike = (
        value.operation in "+*"
        and isinstance(value.terms[1], Quantity)
        and (value.terms[1].operation == value.operation)
    )
    if of_second < binds or (of_second == binds and not alike):
        second = f"({second})"
    return f"{first} {value.operation} {second}", binds


def _number(value: float) -> str:
    """As few digits as say exactly this number."""
    short = f"{value:.12g}"
    return short if float(short) == float(value) else repr(float(value))
