"""Frozen base class for configurations: validated when built, copied instead of changed, printed as
YAML, and hashed.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

if TYPE_CHECKING:
    import pydantic


class InputError(ValueError):
    """Invalid user input. The one-line message says what, where and how to fix it (exit status
    2).
    """


def suggest(name: str, names: Iterable[str], *, otherwise: str) -> str:
    """Return a question with the nearest of the names, else the text `otherwise`."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean '{matches[0]}'?" if matches else otherwise


def first_of(names: Sequence[str], limit: int) -> str:
    """Return the first names, separated by commas, and the number of the others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


_BOUNDS: Final = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "multiple_of": "a multiple of",
}
"""Wording of bounds, by pydantic's names."""

CLASS: Final = "class"
"""Key of the class name in a stored configuration. No field can have this name."""


# Resolving annotations takes milliseconds, and every configuration that is built needs them.
_type_hints = lru_cache(maxsize=1024)(typing.get_type_hints)


def field_types(cls: type, *, include_extras: bool = False) -> dict[str, Any]:
    return _type_hints(cls, include_extras=include_extras)


@lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> Any:
    import pydantic

    return pydantic.TypeAdapter(
        annotation,
        config=pydantic.ConfigDict(strict=True, arbitrary_types_allowed=True),
    )


def _bounds(annotation: Any) -> list[str]:
    """Return the bounds of a type and its nested types, in words."""
    bounds = [
        f"{words} {getattr(bound, name):g}"
        for bound in getattr(annotation, "__metadata__", ())
        for name, words in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    return bounds + [bound for inner in typing.get_args(annotation) for bound in _bounds(inner)]


def _violation(error: pydantic.ValidationError, annotation: Any) -> str:
    """Describe the bound or type that a value violates."""
    first = error.errors()[0]
    if first["type"] == "too_short":
        return f"must have {first['ctx']['min_length']} or more values"
    if not first.get("ctx", {}).keys() & _BOUNDS.keys():
        return f"has the wrong type ({first['msg']})"
    each = "each " if any(isinstance(key, int) for key in first["loc"]) else ""
    return f"must {each}be {' and '.join(_bounds(annotation))}"


def _config_type(annotation: Any) -> type | None:
    """Return the Config class of an annotation (also inside `X | None`), or None."""
    union_types = () if typing.get_origin(annotation) is tuple else typing.get_args(annotation)
    for candidate in (annotation, *union_types):
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


def _item_type(annotation: Any) -> type[Config] | None:
    """Return the Config class C of an annotation tuple[C, ...], or None."""
    arguments = typing.get_args(annotation)
    if (
        typing.get_origin(annotation) is not tuple
        or len(arguments) != 2
        or arguments[1] is not Ellipsis
    ):
        return None
    return (
        arguments[0]
        if isinstance(arguments[0], type) and issubclass(arguments[0], Config)
        else None
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    # YAML cannot write subclasses of str, such as the path of a result's checkpoint.
    return str(value) if isinstance(value, str) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, `dataclasses.MISSING` without one."""
    return (
        field.default_factory()
        if field.default_factory is not dataclasses.MISSING
        else field.default
    )


def same_class(stored: object, class_name: str) -> bool:
    """Return whether a stored `class` is `class_name`, ignoring the module: a recipe's file may be
    imported under any name.
    """
    return str(stored).rpartition(".")[2] == class_name.rpartition(".")[2]


def renamed(old: str, new: str) -> str:
    """Return the deprecation message for an old field or flag name."""
    return f"{old} is now {new}; the old name will be removed in the next release"


# How a value reaches a field:
#
#   built in code         types and bounds are checked by pydantic, in __post_init__
#   flags, YAML, JSON     `updated` with plain values: renamed fields, nested configurations and
#                         lists of them are resolved first
#   stored                `to_dict`, with the class of a nested configuration under `CLASS`
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base class for configurations: frozen dataclasses whose field types are checked when they are
    built.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """New field names by old names, which are accepted for one release."""
    EARLIER: ClassVar[Mapping[str, Any]] = {}
    """Values of later fields in stored configurations of earlier versions, which lack them. Others
    have their defaults.
    """

    def __post_init__(self) -> None:
        import pydantic

        types = field_types(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            annotation = types[field.name]
            nested = _config_type(annotation)
            if nested is not None:
                if not (
                    isinstance(value, nested)
                    or (value is None and type(None) in typing.get_args(annotation))
                ):
                    raise InputError(
                        f"{type(self).__name__}.{field.name}: must be a {nested.__name__}, got "
                        f"{value!r}"
                    )
                continue
            try:
                _adapter(annotation).validate_python(value)
            except pydantic.ValidationError as error:
                raise InputError(
                    f"{type(self).__name__}.{field.name}: {_violation(error, annotation)}, got "
                    f"{value!r}"
                ) from None

    @classmethod
    def _custom_class(cls) -> str | None:
        """Return the class name if it is defined outside rayrec, in which case a stored
        configuration must contain it.
        """
        return (
            None
            if cls.__module__.partition(".")[0] == "rayrec"
            else f"{cls.__module__}.{cls.__qualname__}"
        )

    def with_class(self, name: object) -> Any:
        """Return a configuration of another class that can replace this one, given its stored
        `class`, or None if unknown.
        """

    def _allowed_classes(self) -> str:
        class_name = type(self)._custom_class() or type(self).__qualname__
        return f"{class_name}. Use the recipe that created the configuration"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed fields. A dict changes fields of a nested configuration. Warns
        about old field names.
        """
        for old in self.RENAMED.keys() & changes.keys():
            warnings.warn(
                renamed(f"{type(self).__name__}.{old}", self.RENAMED[old]),
                FutureWarning,
                stacklevel=2,
            )
        return self.updated(changes)

    def updated(self, changes: Mapping[str, Any], *, where: str = "") -> Self:
        """Return a copy updated with `changes`. Nested mappings update nested configurations. A
        `class` changes the class, if `with_class` allows it. Raises InputError, with the closest
        match, for an unknown name, and a `class` not allowed.
        """
        stored = changes.get(CLASS)
        if stored is not None:
            changes = {name: value for name, value in changes.items() if name != CLASS}
            class_name = type(self)._custom_class()
            if class_name is None or not same_class(stored, class_name):
                other = self.with_class(stored)
                if other is None:
                    raise InputError(
                        f"{where}{CLASS}: does not match the recipe, got {stored}, and the recipe "
                        f"has {self._allowed_classes()}"
                    )
                return other.updated(changes, where=where)
        if changes.keys() & self.RENAMED.keys():
            changes = self._with_new_names(changes, where)
        changes = self.expanded(changes)
        types = field_types(type(self))
        new: dict[str, Any] = {}
        for name, value in changes.items():
            self._check_field(name, where)
            current = getattr(self, name)
            item_type = _item_type(types[name])
            if isinstance(value, Mapping) and isinstance(current, Config):
                new[name] = current.updated(value, where=f"{where}{name}.")
            elif item_type is not None and isinstance(value, list | tuple):
                new[name] = tuple(
                    item_type.from_values(item, where=f"{where}{name}[{number}].")
                    if isinstance(item, Mapping)
                    else item
                    for number, item in enumerate(value)
                )
            else:
                new[name] = _tuples(value)
        return dataclasses.replace(self, **new)

    def expanded(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the changes with short forms of values written out, for classes that accept any.
        Raises InputError.
        """
        return changes

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str) -> Config:
        """Build an item of a list from plain values and defaults. `where` prefixes errors. Raises
        InputError for an unknown name, an invalid value, or a missing value.
        """
        for name in values:
            cls._check_field(name, where)
        for field in dataclasses.fields(cls):
            if field.name not in values and default_of(field) is dataclasses.MISSING:
                raise InputError(f"{where}{field.name}: {cls.__name__} requires a value")
        return cls(**{name: _tuples(value) for name, value in values.items()})

    def _with_new_names(self, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        for old, new in self.RENAMED.items():
            if old in changes and new in changes:
                raise InputError(
                    f"{where}{old}: is the old name of {new}, which is set too. Remove {old}."
                )
        return {self.RENAMED.get(name, name): value for name, value in changes.items()}

    @classmethod
    def _check_field(cls, name: str, where: str) -> None:
        names = [field.name for field in dataclasses.fields(cls)]
        if name not in names:
            hint = suggest(name, names, otherwise=f"it has {', '.join(names)}")
            raise InputError(f"{where}{name}: {cls.__name__} has no such field; {hint}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars for JSON or YAML, with `class` for a class defined
        outside rayrec.
        """
        class_name = type(self)._custom_class()
        named = {} if class_name is None else {CLASS: class_name}
        return named | {
            field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)
        }

    def to_yaml(self) -> str:
        """Return the full resolved configuration as YAML, with fields in declaration order."""
        import yaml

        return yaml.safe_dump(
            self.to_dict(),
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=None,
            width=120,
        )

    def config_hash(self) -> str:
        """Return the hash of the configuration's plain values."""
        return settings_hash(self.to_dict())


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 over the canonical JSON of plain settings."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def packaged_json(package: str, name: str) -> Any:
    """Load a JSON file of a package, such as a table of constants."""
    return json.loads(resources.files(package).joinpath(name).read_text())


def json_hash(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a JSON value, independent of the order of
    keys.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


TEXT: Final = ""
"""Key of a text value for a nested configuration that also has other settings."""


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with dotted names (`scaling.num_workers`) to nested settings. Mappings are
    merged in any order, and of two values of one setting the later is returned.
    """
    nested: dict[str, Any] = {}
    for path, value in settings.items():
        *names, last = path.split(".")
        target = nested
        for name in names:
            inner = target.setdefault(name, {})
            if not isinstance(inner, dict):
                inner = target[name] = {TEXT: inner}
            target = inner
        target[last] = _merged(target.get(last), value)
    return nested


def _merged(before: Any, value: Any) -> Any:
    """Return a setting's value, with the settings of an earlier mapping that it does not change.
    Copies mappings.
    """
    earlier = before if isinstance(before, dict) else {}
    if isinstance(value, Mapping):
        return {
            **earlier,
            **{name: _merged(earlier.get(name), inner) for name, inner in value.items()},
        }
    return {**earlier, TEXT: value} if isinstance(before, dict) else value


def error_line(error: BaseException) -> str:
    """Return an error as one line: the text of an InputError, else the class and the last line of
    its text.
    """
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
