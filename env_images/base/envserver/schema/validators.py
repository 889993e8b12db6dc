"""A small validator: each node checks one kind of JSON value and produces its JSON Schema.

Request bodies and tool inputs use the same nodes. The types, texts and order of faults match pydantic's, because
clients of the reference servers may depend on them. Coercion follows pydantic's lax mode (``"2"`` is the integer 2)
where that is cheap. `Text` differs from pydantic's text on purpose.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Loc: TypeAlias = tuple[str | int, ...]
Fault: TypeAlias = dict[str, Any]
"""A fault with the keys ``type``, ``loc``, ``msg``, ``input`` and sometimes ``ctx``, in this order."""


class Node(Protocol):
    """A check for one kind of value."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema."""

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        """Return *value* as a Python value, or add its errors to *faults*.

        If faults were added, the returned value has no meaning. Without *lax*, nothing is coerced.
        """


def fault(kind: str, loc: Loc, text: str, value: Any) -> Fault:
    return {"type": kind, "loc": loc, "msg": text, "input": value}


class AnyValue:
    def schema(self) -> dict[str, Any]:
        return {}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        return value


class Null:
    def schema(self) -> dict[str, Any]:
        return {"type": "null"}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if value is not None:
            faults.append(fault("none_required", loc, "Input should be None", value))


class Str:
    def schema(self) -> dict[str, Any]:
        return {"type": "string"}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if not isinstance(value, str):
            faults.append(fault("string_type", loc, "Input should be a valid string", value))
        return value


class Text(Str):
    """A tool's text argument. A number stands for its JSON text, because models write ``{"answer": 42}``."""

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if lax and isinstance(value, int | float) and not isinstance(value, bool):
            return json.dumps(value)
        return super().check(value, loc, faults, lax=lax)


class Bool:
    _WORDS: Mapping[str, bool] = {
        **dict.fromkeys(("true", "t", "1", "yes", "y", "on"), True),
        **dict.fromkeys(("false", "f", "0", "no", "n", "off"), False),
    }

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if isinstance(value, bool):
            return value
        if lax and isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if lax and isinstance(value, str) and (word := self._WORDS.get(value.lower())) is not None:
            return word
        if lax and (isinstance(value, str | int) or (isinstance(value, float) and value.is_integer())):
            text = "Input should be a valid boolean, unable to interpret input"
            faults.append(fault("bool_parsing", loc, text, value))
        else:
            faults.append(fault("bool_type", loc, "Input should be a valid boolean", value))
        return value


class Int:
    def schema(self) -> dict[str, Any]:
        return {"type": "integer"}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if lax and isinstance(value, bool):
            return int(value)
        if lax and isinstance(value, float):
            if value.is_integer():
                return int(value)
            text = "Input should be a valid integer, got a number with a fractional part"
            faults.append(fault("int_from_float", loc, text, value))
        elif lax and isinstance(value, str):
            if (parsed := _parse_int(value)) is not None:
                return parsed
            text = "Input should be a valid integer, unable to parse string as an integer"
            faults.append(fault("int_parsing", loc, text, value))
        else:
            faults.append(fault("int_type", loc, "Input should be a valid integer", value))
        return value


class Float:
    def schema(self) -> dict[str, Any]:
        return {"type": "number"}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if isinstance(value, float):
            return value
        if lax and isinstance(value, int):
            return _to_float(value)
        if lax and isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                text = "Input should be a valid number, unable to parse string as a number"
                faults.append(fault("float_parsing", loc, text, value))
        else:
            faults.append(fault("float_type", loc, "Input should be a valid number", value))
        return value


class ListOf:
    """A JSON array. *make* converts the checked list to the type of the signature, such as a set."""

    def __init__(self, item: Node, make: Callable[[list[Any]], Any] = list, *, unique: bool = False) -> None:
        self._item = item
        self._make = make
        self._unique = unique

    def schema(self) -> dict[str, Any]:
        unique = {"uniqueItems": True} if self._unique else {}
        return {"type": "array", "items": self._item.schema(), **unique}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if not isinstance(value, list):
            faults.append(fault("list_type", loc, "Input should be a valid list", value))
            return value
        before = len(faults)
        items = [self._item.check(item, (*loc, i), faults, lax=lax) for i, item in enumerate(value)]
        if len(faults) > before:
            return value
        try:
            return self._make(items)
        except TypeError:  # a set of unhashable items
            faults.append(fault("set_item_not_hashable", loc, "Set items should be hashable", value))
            return value


class TupleOf:
    """A JSON array of fixed length."""

    def __init__(self, items: Sequence[Node]) -> None:
        self._items = items

    def schema(self) -> dict[str, Any]:
        count = len(self._items)
        items = [item.schema() for item in self._items]
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if not isinstance(value, list):
            faults.append(fault("tuple_type", loc, "Input should be a valid tuple", value))
            return value
        if len(value) > len(self._items):
            text = f"Tuple should have at most {len(self._items)} items after validation, not {len(value)}"
            faults.append(fault("too_long", loc, text, value))
            return value
        pairs = zip(self._items, value, strict=False)
        checked = tuple(node.check(item, (*loc, i), faults, lax=lax) for i, (node, item) in enumerate(pairs))
        for i in range(len(value), len(self._items)):
            faults.append(fault("missing", (*loc, i), "Field required", value))
        return checked


class DictOf:
    """A JSON object with any keys."""

    def __init__(self, item: Node, key: Node | None = None) -> None:
        self._item = item
        self._key = key

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._item.schema() or True}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if not isinstance(value, dict):
            faults.append(fault("dict_type", loc, "Input should be a valid dictionary", value))
            return value
        checked = {}
        for key, item in value.items():
            name = key if self._key is None else self._key.check(key, (*loc, key, "[key]"), faults)
            checked[name] = self._item.check(item, (*loc, key), faults, lax=lax)
        return checked


class Choice:
    """A choice among a few JSON values. Each maps to a Python value: an enum's member, or itself."""

    def __init__(self, values: Sequence[tuple[Any, Any]], kind: str) -> None:
        self._values = values
        self._kind = kind

    def schema(self) -> dict[str, Any]:
        plain = [value for value, _ in self._values]
        types = {_SCALARS.get(type(value)) for value in plain}
        named = {"type": types.pop()} if len(types) == 1 and None not in types else {}
        return {"enum": plain, **named}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        for is_exact in (True, False) if lax else (True,):  # 1 == True, but an exact match takes precedence
            for plain, meant in self._values:
                if value == plain and (type(value) is type(plain) or not is_exact):
                    return meant
        options = [repr(plain) for plain, _ in self._values]
        text = " or ".join(part for part in (", ".join(options[:-1]), options[-1]) if part)
        faults.append(fault(self._kind, loc, f"Input should be {text}", value))
        return value


class OneOf:
    """A union. The first branch that accepts the value unchanged wins, else the first that can coerce it."""

    def __init__(self, branches: Sequence[tuple[str, Node]]) -> None:
        self._branches = branches

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [node.schema() for _, node in self._branches]}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        found: list[Fault] = []
        for as_it_is in (True, False) if lax else (True,):
            found = []
            for name, node in self._branches:
                mine: list[Fault] = []
                # With a single branch besides null, its faults omit the branch's name, as in pydantic.
                where = loc if self._is_optional else (*loc, name)
                checked = node.check(value, where, mine, lax=not as_it_is)
                if not mine:
                    return checked
                if not (self._is_optional and isinstance(node, Null)):
                    found.extend(mine)
        faults.extend(found)
        return value

    @property
    def _is_optional(self) -> bool:
        return len(self._branches) == 2 and any(isinstance(node, Null) for _, node in self._branches)


NO_DEFAULT: Any = ...
"""Marker for a key without a default. None is a default like any other."""


class Field(NamedTuple):
    """A key of an object. *default* is the JSON that the schema shows."""

    name: str
    node: Node
    required: bool = True
    default: Any = NO_DEFAULT
    description: str = ""


class Shape:
    """A JSON object with named keys, which *make* converts to a dict, a dataclass or another type.

    Absent optional keys are omitted, so that ``make``'s own defaults apply. If *closed*, an unknown key is a fault.
    Otherwise it is ignored.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        make: Callable[..., Any] = dict,
        *,
        closed: bool = False,
        not_object: tuple[str, str] = ("dict_type", "Input should be a valid dictionary"),
    ) -> None:
        self.fields = fields
        self._names = frozenset(field.name for field in fields)
        self._make = make
        self._closed = closed
        self._not_object = not_object

    def schema(self) -> dict[str, Any]:
        described: dict[str, Any] = {}
        for field in self.fields:
            described[field.name] = field.node.schema()
            if field.description:
                described[field.name]["description"] = field.description
            if field.default is not NO_DEFAULT:
                described[field.name]["default"] = field.default
        required = [field.name for field in self.fields if field.required]
        return {"type": "object", "properties": described, **({"required": required} if required else {})}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        if not isinstance(value, dict):
            faults.append(fault(self._not_object[0], loc, self._not_object[1], value))
            return value
        before = len(faults)
        made = {}
        for field in self.fields:
            if field.name in value:
                made[field.name] = field.node.check(value[field.name], (*loc, field.name), faults, lax=lax)
            elif field.required:
                faults.append(fault("missing", (*loc, field.name), "Field required", value))
        if self._closed and value.keys() - self._names:
            for key in value:
                if key not in self._names:
                    text = "Extra inputs are not permitted"
                    faults.append(fault("extra_forbidden", (*loc, key), text, value[key]))
        if len(faults) > before:
            return value
        try:
            return self._make(**made)
        except ValueError as error:
            faults.append(rule_broken(loc, str(error), value))
            return value


def rule_broken(loc: Loc, text: str, value: Any) -> Fault:
    """Return the fault for a violated rule that spans several keys."""
    return {**fault("value_error", loc, f"Value error, {text}", value), "ctx": {"error": {}}}


def optional(node: Node) -> OneOf:
    return OneOf((("value", node), ("none", Null())))


_SCALARS: Mapping[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
# Longer texts are not meant as numbers, and int() takes quadratic time for them.
_LONGEST_INT = 4_000


def _parse_int(text: str) -> int | None:
    if len(text) > _LONGEST_INT:
        return None
    whole, point, fraction = text.strip().partition(".")
    if point and (not fraction or fraction.strip("0")):  # "2.0" is an integer, "2." and "2.5" are not
        return None
    try:
        return int(whole)
    except ValueError:
        return None


def _to_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
