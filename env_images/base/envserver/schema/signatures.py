"""Converts a tool's signature to nodes that check its input and produce its JSON Schema.

Supported annotations: str, int, float, bool, None, Any, object; list, set, tuple, dict and their abstract classes;
Literal; Enum classes; unions and Optional; TypedDict; dataclasses; Annotated with a text as the description.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from envserver.errors import ConfigError
from envserver.schema.validators import (
    NO_DEFAULT,
    AnyValue,
    Bool,
    Choice,
    DictOf,
    Field,
    Float,
    Int,
    ListOf,
    Node,
    Null,
    OneOf,
    Shape,
    Str,
    Text,
    TupleOf,
)

_PLAIN: Mapping[Any, type[Node]] = {
    str: Str,
    int: Int,
    float: Float,
    bool: Bool,
    None: Null,
    type(None): Null,
    Any: AnyValue,
    object: AnyValue,
}
_MAKERS: Mapping[Any, tuple[Callable[[list[Any]], Any], bool]] = {
    **dict.fromkeys((list, Sequence, Collection, Iterable), (list, False)),
    set: (set, True),
    frozenset: (frozenset, True),
}


def parameters_of(function: Callable[..., Any], *, bound: bool) -> list[Field]:
    """Return *function*'s parameters as fields. If it is not *bound*, omit the first parameter (``self``).

    Raises:
        ConfigError: A parameter is variadic, or its annotation is missing or has no JSON form.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its annotations cannot be read: {error}") from error
    return [_field(name, parameter, hints) for parameter in (parameters if bound else parameters[1:])]


def _field(function: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Field:
    place = f"{function}, parameter {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(f"{place}: must be a named parameter")
    if parameter.name not in hints:
        raise ConfigError(f"{place}: needs a type annotation")
    required = parameter.default is parameter.empty
    hint, default = hints[parameter.name], NO_DEFAULT if required else _as_json(parameter.default)
    node = node_of(hint, place)
    return Field(parameter.name, Text() if type(node) is Str else node, required, default, _description(hint))


def _as_json(default: Any) -> Any:
    if isinstance(default, Enum):
        return default.value
    if isinstance(default, tuple | set | frozenset):
        return list(default)
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        return dataclasses.asdict(default)
    return default


def _description(annotation: Any) -> str:
    notes = getattr(annotation, "__metadata__", ())
    return next((note for note in notes if isinstance(note, str)), "")


def node_of(annotation: Any, place: str, *, within: tuple[Any, ...] = ()) -> Node:
    """Return the node for *annotation*. *place* is for errors, and *within* holds the enclosing classes.

    Raises:
        ConfigError: JSON cannot represent such a value, or the class contains itself.
    """
    if (plain := _PLAIN.get(annotation) if _is_hashable(annotation) else None) is not None:
        return plain()
    if annotation in within:
        raise ConfigError(f"{place}: {annotation.__name__} contains itself")
    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return node_of(arguments[0], place, within=within)
    if origin in (typing.Union, types.UnionType):
        return OneOf([(_branch(branch), node_of(branch, place, within=within)) for branch in arguments])
    if origin is typing.Literal:
        return Choice([(value, value) for value in arguments], "literal_error")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return TupleOf([node_of(item, place, within=within) for item in arguments])
    if origin is tuple:
        return ListOf(node_of(arguments[0] if arguments else Any, place, within=within), tuple)
    if origin in _MAKERS:
        make, unique = _MAKERS[origin]
        return ListOf(node_of(arguments[0] if arguments else Any, place, within=within), make, unique=unique)
    if isinstance(origin, type) and issubclass(origin, Mapping) and not _is_typed_dict(origin):
        key, item = arguments or (str, Any)
        key_node = None if key is str else node_of(key, place, within=within)
        return DictOf(node_of(item, place, within=within), key_node)
    if isinstance(origin, type):
        return _class_node(origin, place, within)
    raise ConfigError(f"{place}: {annotation!r} cannot be an input")


def _class_node(cls: type, place: str, within: tuple[Any, ...]) -> Node:
    if issubclass(cls, Enum):
        return Choice([(member.value, member) for member in cls], "enum")
    if dataclasses.is_dataclass(cls):
        text = f"Input should be a dictionary or an instance of {cls.__name__}"
        return Shape(_dataclass_fields(cls, place, (*within, cls)), cls, not_object=("dataclass_type", text))
    if _is_typed_dict(cls):
        return Shape(_typed_dict_fields(cls, place, (*within, cls)))
    raise ConfigError(f"{place}: {cls.__name__} cannot be an input")


def _dataclass_fields(cls: type, place: str, within: tuple[Any, ...]) -> list[Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint = hints[field.name]
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        required = default is dataclasses.MISSING
        node = node_of(hint, place, within=within)
        # As in pydantic, a factory's default is not part of the schema.
        shown = NO_DEFAULT if required or field.default is dataclasses.MISSING else _as_json(default)
        found.append(Field(field.name, node, required, shown, _description(hint)))
    return found


def _typed_dict_fields(cls: type, place: str, within: tuple[Any, ...]) -> list[Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    needed: frozenset[str] = cls.__required_keys__  # type: ignore[attr-defined]  # every TypedDict has it
    found = []
    for name, annotation in hints.items():
        hint = annotation
        while typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            (hint,) = typing.get_args(hint)
        node = node_of(hint, place, within=within)
        found.append(Field(name, node, name in needed, NO_DEFAULT, _description(hint)))
    return found


def _is_typed_dict(cls: type) -> bool:
    # Not typing.is_typeddict, because it does not recognize the TypedDicts of typing_extensions.
    return issubclass(cls, dict) and hasattr(cls, "__required_keys__")


def _branch(annotation: Any) -> str:
    return getattr(annotation, "__name__", None) or str(annotation)


def _is_hashable(annotation: Any) -> bool:
    try:
        hash(annotation)
    except TypeError:
        return False
    return True
