"""Row ranges of a log: training, validation, test, and days."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from rayrec.config import Config, InputError, first_of
from rayrec.data.logs.index import LogIndex, resolve_source

NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class Slice:
    """Range of the log that is compared with others."""

    name: str
    start: int
    stop: int
    """End of the rows [start, stop) of the log."""


Kind = Literal[
    "sevenths", "last_file", "last_partition", "named_files", "fraction", "days", "named_days"
]


@dataclass(frozen=True, kw_only=True)
class SplitParts(Config):
    """Part sizes of a split, for the kinds that allow a choice. A day is a file, or all files of a
    folder KEY=VALUE.
    """

    validation: float = 0.1
    """Fraction of the log's rows for validation, in log order. Kind fraction only."""
    test: float = 0.1
    """Fraction of the rows for the final test, at the end of the log. 0: no test. Kind fraction
    only.
    """
    train_days: int | None = None
    """Number of first days for training. None: all days before the held-out ones. Kind days
    only.
    """
    validation_days: int = 1
    """Number of days for validation, before the test days. Kind days only."""
    test_days: int = 1
    """Number of last days for the final test. 0: no test. Kind days only."""
    train_names: tuple[str, ...] = ()
    """Training days, by name or pattern (day_1*, dt=2026-01-*). Empty: all days not held out. Kind
    named_days only.
    """
    validation_names: tuple[str, ...] = ()
    """Validation days, by name or pattern. Kind named_days only."""
    test_names: tuple[str, ...] = ()
    """Days of the final test, by name or pattern. Empty: no test. Kind named_days only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.validation < 1 and 0 <= self.test < 1 and self.validation + self.test < 1):
            raise InputError(
                "split fraction: validation must be above 0, test at least 0, and their sum below "
                f"1, got {self.validation} and {self.test}"
            )
        if (
            self.validation_days < 1
            or self.test_days < 0
            or (self.train_days is not None and self.train_days < 1)
        ):
            raise InputError(
                "split days: train_days and validation_days must be at least 1, and test_days at "
                "least 0"
            )


_KIND_FIELDS: dict[str, tuple[str, ...]] = {
    "fraction": ("validation", "test"),
    "days": ("train_days", "validation_days", "test_days"),
    "named_days": ("train_names", "validation_names", "test_names"),
}
"""SplitParts fields of each kind."""


def check_parts(kind: str, parts: SplitParts) -> None:
    """Check that only sizes of the kind are set, and that named_days has validation days. Raises
    InputError.
    """
    for owner, names in _KIND_FIELDS.items():
        for name in names:
            if kind != owner and getattr(parts, name) != getattr(SplitParts(), name):
                raise InputError(
                    f"split {kind}: {name} applies to kind {owner} only; remove it or choose "
                    f"{owner}"
                )
    if kind == "named_days" and not parts.validation_names:
        raise InputError(
            "split named_days: validation_names is empty; name the days for validation"
        )


@dataclass(frozen=True, kw_only=True)
class Split(SplitParts):
    """Split of a log into row ranges, in log order."""

    kind: Kind = "sevenths"
    """Split method. sevenths: six of seven parts for training (Criteo Kaggle). last_file: all files
    but the last (Criteo 1TB). last_partition: all files except those in the last folder KEY=VALUE,
    such as the last day of dt=2026-01-31/. These three halve the rest into validation and test.
    named_files: files whose names begin with train, valid and test, as written by `rayrec split`.
    fraction: by fractions of the rows. days: by day counts. named_days: by day names.
    """
    test_first: bool = False
    """Whether to use the first held-out rows for the test and the rest for validation, instead of
    the other way round.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.kind, self)

    def rows(self, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Return the row ranges [start, stop) of `train`, `validation` and `test`, which do not
        overlap. Kinds days and named_days may omit rows; `test` may be absent for kinds
        named_files, fraction, days and named_days. sevenths: seven near-equal chunks, the first
        `rows mod 7` one row longer. The last chunk's first half, longer by one row if odd, is for
        validation (TorchRec's order for Criteo 1TB), or with test_first for the test (dlrm's
        data_utils). fraction: rounded to rows. Raises InputError for an empty part, and for named
        days that are missing or not adjacent.
        """
        if self.kind == "named_files":
            return _by_name(index)
        if self.kind == "named_days":
            return self._by_named_days(index)
        split = self._at_end(index)
        empty = [name for name in split if split[name][0] >= split[name][1]]
        if empty:
            num_files = len({resolve_source(segment.path) for segment in index.segments})
            raise InputError(
                f"split {self.kind}: {index.rows} rows in {num_files} files leave no rows for "
                f"{' and '.join(empty)}; add data, or an evaluation log with --eval-data.path"
            )
        return split

    # Parts of a log, in its order. Held-out rows come last, as later rows do in production:
    #
    #   0 ---------- train ---------- stop    boundary -- first -- middle -- second -- rows
    #
    # `first` is the validation set and `second` the test set, or the reverse with test_first.
    # Between `stop` and `boundary` are days that `train_days` leaves out.
    def _at_end(self, index: LogIndex) -> dict[str, tuple[int, int]]:
        """Return the parts of the kinds that hold out the end of a log; they may be empty."""
        train_stop = None
        if self.kind == "fraction":
            sizes = {
                "validation": round(index.rows * self.validation),
                "test": round(index.rows * self.test),
            }
            absent = not self.test
        elif self.kind == "days":
            days = _days(index)
            sizes = self._day_sizes(days)
            absent = not self.test_days
            train_stop = days[min(self.train_days or len(days), len(days)) - 1].stop if days else 0
        else:
            num_rows = index.rows - self._boundary(index)
            sizes = {"test": num_rows // 2, "validation": num_rows - num_rows // 2}
            if self.test_first:
                sizes = {"test": sizes["validation"], "validation": sizes["test"]}
            absent = False
        first, second = NAMES[:0:-1] if self.test_first else NAMES[1:]
        middle = index.rows - sizes[second]
        boundary = max(middle - sizes[first], 0)
        if train_stop is not None and self.train_days is not None and train_stop > boundary:
            boundary_days = len([day for day in _days(index) if day.stop <= boundary])
            raise InputError(
                f"split days: train_days {self.train_days} and held-out days overlap; "
                f"{boundary_days} days are left"
            )
        stop = boundary if train_stop is None else min(train_stop, boundary)
        split = {"train": (0, stop), first: (boundary, middle), second: (middle, index.rows)}
        return {name: split[name] for name in NAMES if not (absent and name == "test")}

    def _boundary(self, index: LogIndex) -> int:
        if self.kind == "sevenths":
            return index.rows - index.rows // 7
        unit = _partition if self.kind == "last_partition" else resolve_source
        last = unit(index.segments[-1].path) if index.segments else None
        return next((s.first_row for s in index.segments if unit(s.path) == last), 0)

    def _day_sizes(self, days: Sequence[Slice]) -> dict[str, int]:
        first, second = (
            (self.test_days, self.validation_days)
            if self.test_first
            else (self.validation_days, self.test_days)
        )
        if len(days) < first + second + 1:
            raise InputError(
                f"split days: the log has {len(days)} days, and {first + second} held-out ones "
                "leave none for training; add files or hold out fewer"
            )
        rows = [day.stop - day.start for day in days]
        second_rows = sum(rows[len(rows) - second :])
        first_rows = sum(rows[len(rows) - second - first : len(rows) - second])
        return (
            {"test": first_rows, "validation": second_rows}
            if self.test_first
            else {"validation": first_rows, "test": second_rows}
        )

    def _by_named_days(self, index: LogIndex) -> dict[str, tuple[int, int]]:
        patterns = {
            "train": self.train_names,
            "validation": self.validation_names,
            "test": self.test_names,
        }
        days = _days(index)
        chosen = []
        for day in days:
            named = [
                name
                for name, texts in patterns.items()
                if any(_matches(day.name, pattern) for pattern in texts)
            ]
            if len(named) > 1:
                raise InputError(
                    f"split named_days: {day.name} is named for {' and '.join(named)}; name it "
                    "for one of them"
                )
            # Without named training days, they are all that are not held out.
            if named or not self.train_names:
                chosen.append((named[0] if named else "train", day))
        _check_days_exist(patterns, days)
        split = _joined(
            chosen,
            "split named_days: the days",
            "name adjacent days, or reorder them with --train-data.files",
        )
        named = [name for name in NAMES if name == "train" or patterns[name]]
        empty = [name for name in named if name not in split or split[name][0] == split[name][1]]
        if empty:
            raise InputError(
                f"split named_days: no rows for {' and '.join(empty)}; name other days"
            )
        return split


def _check_days_exist(patterns: Mapping[str, Sequence[str]], days: Sequence[Slice]) -> None:
    """Check that each named day of a part is one of the log. Raises InputError."""
    for name, texts in patterns.items():
        for pattern in texts:
            if any(_matches(day.name, pattern) for day in days):
                continue
            raise InputError(
                f"split named_days: {name}_names: no day is named {pattern}; the log has "
                f"{first_of([day.name for day in days], 8)}"
            )


def _joined(
    chosen: Iterable[tuple[str, Slice]], names: str, fix: str
) -> dict[str, tuple[int, int]]:
    """Return the row range of each part of a split, from its slices in log order. Raises InputError
    if those of a part are not adjacent.
    """
    split: dict[str, tuple[int, int]] = {}
    for part, rows in chosen:
        start, stop = split.get(part, (rows.start, rows.start))
        if stop != rows.start:
            raise InputError(f"{names} of {part} are not adjacent at {rows.name}; {fix}")
        split[part] = (start, rows.stop)
    return {name: split[name] for name in NAMES if name in split}


def _matches(day: str, pattern: str) -> bool:
    """Return whether a pattern, or a name with or without file extensions, matches a day."""
    return (
        fnmatchcase(day, pattern) or re.sub(r"(\.(txt|tsv|csv|parquet|gz))+$", "", day) == pattern
    )


def _days(index: LogIndex) -> list[Slice]:
    """Return the days of a log in its order: folders KEY=VALUE if all files are in one, else
    files.
    """
    sources = [resolve_source(segment.path) for segment in index.segments]
    if sources and all("/" in name for _, name in sources):
        sources = [(folder := name.rpartition("/")[0], folder) for _, name in sources]
    return _slices(index, sources)


def _slices(index: LogIndex, units: Sequence[tuple[str, str]]) -> list[Slice]:
    """Return the row ranges of adjacent segments with the same unit. `units` is the (key, name) of
    each segment.
    """
    slices: list[Slice] = []
    last = None
    for segment, (key, name) in zip(index.segments, units, strict=True):
        stop = segment.first_row + segment.rows
        if key == last:
            slices[-1] = replace(slices[-1], stop=stop)
        else:
            slices.append(Slice(name, segment.first_row, stop))
        last = key
    return slices


def _partition(path: str) -> str:
    """Return the partition path of a file. Raises InputError if it has none."""
    partition = resolve_source(path)[1].rpartition("/")[0]
    if not partition:
        raise InputError(
            f"split last_partition: {path} must be in a folder named KEY=VALUE; choose last_file "
            "or sevenths"
        )
    return partition


def part_of_file(path: str) -> str | None:
    """Return the part for which a file is named, one of NAMES; None for other names."""
    base = resolve_source(path)[1].rpartition("/")[2].lower()
    return next((name for name in NAMES if base.startswith(name[:5])), None)


def _by_name(index: LogIndex) -> dict[str, tuple[int, int]]:
    chosen = []
    for segment in index.segments:
        name = part_of_file(segment.path)
        if name is None:
            raise InputError(
                f"split named_files: {segment.path} must begin with train, valid or test; rename it"
            )
        stop = segment.first_row + segment.rows
        chosen.append((name, Slice(segment.path, segment.first_row, stop)))
    split = _joined(chosen, "split named_files: the files", "join them")
    missing = [name for name in NAMES[:2] if name not in split]
    if missing:
        raise InputError(
            f"split named_files: no file begins with {' or '.join(name[:5] for name in missing)}"
        )
    return split


MAX_SLICES = 64
"""Maximum number of files compared separately. Of more files, neighbours are combined."""


def slices_of(index: LogIndex) -> tuple[str, list[Slice]]:
    """Return the kind of slices (file, files, seventh), and the slices in log order."""
    files = _slices(index, [resolve_source(segment.path) for segment in index.segments])
    if len(files) > MAX_SLICES:
        ends = [len(files) * (i + 1) // MAX_SLICES for i in range(MAX_SLICES)]
        groups = [files[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
        return "files", [
            Slice(f"{group[0].name} ... {group[-1].name}", group[0].start, group[-1].stop)
            for group in groups
        ]
    if len(files) != 1:
        return "file", files
    size, longer = divmod(index.rows, 7)
    edges = [i * size + min(i, longer) for i in range(8)]
    named = [Slice(f"seventh {i + 1}", edges[i], edges[i + 1]) for i in range(7)]
    return "seventh", [each for each in named if each.stop > each.start]
