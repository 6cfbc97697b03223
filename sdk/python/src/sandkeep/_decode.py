"""JSON to data classes. Fields that are not known are left out: a newer server may say more."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import types as python_types
import typing
from typing import Any, TypeVar, cast

from ._errors import ProtocolError

T = TypeVar("T")


def decode(kind: type[T], value: Any) -> T:
    """Reads `value` as `kind`, which is a data class, a list of them, a union or a plain type."""
    return cast("T", _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, python_types.UnionType):
        return _read_union(typing.get_args(kind), value)
    if origin is list:
        (item,) = typing.get_args(kind)
        return [_read(item, one) for one in value or []]
    if origin is dict:
        _, item = typing.get_args(kind)
        return {name: _read(item, one) for name, one in (value or {}).items()}
    plain: Any = origin or kind
    if dataclasses.is_dataclass(plain):
        if not isinstance(value, dict):
            wanted = getattr(plain, "__name__", plain)
            raise ProtocolError(f"the server answered `{value!r:.80}` where a {wanted} was expected")
        return _read_record(kind, plain, value)
    return value


def _read_union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        lists = [one for one in kinds if typing.get_origin(one) is list]
        return _read(lists[0], value) if lists and isinstance(value, list) else value
    records = [one for one in kinds if dataclasses.is_dataclass(typing.get_origin(one) or one)]
    for record in records:
        if _is_meant(record, value):
            return _read(record, value)
    return _read(records[0], value) if len(records) == 1 else value


def _is_meant(record: Any, value: dict[str, Any]) -> bool:
    """Whether a value has the tags and the fields that a record must have."""
    hints = _hints(typing.get_origin(record) or record)
    for name, kind, needed in hints:
        if typing.get_origin(kind) is typing.Literal and len(typing.get_args(kind)) == 1:
            if value.get(name) != typing.get_args(kind)[0]:
                return False
        elif needed and name not in value:
            return False
    return True


def _read_record(kind: Any, plain: Any, value: dict[str, Any]) -> Any:
    arguments = typing.get_args(kind)
    found: dict[str, Any] = {}
    for name, field_kind, needed in _hints(plain):
        if arguments and typing.get_args(field_kind) and isinstance(typing.get_args(field_kind)[0], TypeVar):
            field_kind = list[arguments[0]]  # type: ignore[valid-type]
        own = name + "_" if keyword.iskeyword(name) else name
        if name in value:
            found[own] = _read(field_kind, value[name])
        elif needed:
            found[own] = _zero(field_kind)
    return plain(**found)


def _zero(kind: Any) -> Any:
    """What a field has that an older server does not tell."""
    plain = typing.get_origin(kind) or kind
    return plain() if plain in (str, int, float, bool, list, dict) else None


@functools.cache
def _hints(record: Any) -> list[tuple[str, Any, bool]]:
    """Fields of a data class: their names in JSON, their types, and whether they must be given."""
    hints = typing.get_type_hints(record)
    missing = dataclasses.MISSING
    return [
        (
            field.name.rstrip("_"),
            hints[field.name],
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(record)
    ]
