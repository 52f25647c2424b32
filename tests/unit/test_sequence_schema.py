"""A schema of events declares the lists that are built of them."""

import pytest

from rayrec.config import InputError
from rayrec.schema import Feature, Schema, SequenceColumns, SequenceSplit, load_schema

TEXT = """
label: null
sequence: {user: who, item: film, time: at, with: [action], max_length: 20, min_length: 3}
split: {kind: time, test: 60d, validation: 12h}
integers: [who, film]
format: csv
"""


@pytest.fixture
def schema() -> Schema:
    return load_schema(TEXT, "events.yaml")


def test_sequence_adds_features_of_lists(schema: Schema) -> None:
    assert schema.sparse == schema.lists == ("film", "action", "target", "seen")
    assert schema.optional == ("target", "seen")
    assert schema.features == (
        Feature(name="film", max_length=21),
        Feature(name="action", max_length=21, aligned_with="film"),
        Feature(name="target", vocabulary="film"),
        Feature(name="seen", vocabulary="film"),
    )


def test_logs_with_times_have_ages(schema: Schema) -> None:
    timed = schema.with_ages(reads_ages=True)
    assert (timed.aged, timed.feature("film").ages) == (("film",), "age")
    assert timed.columns == ("film", "action", "target", "seen", "age")
    assert timed.events == schema.events
    assert Schema.described(timed.describe()) == timed
    assert timed.with_ages(reads_ages=False) == schema == schema.with_ages(reads_ages=False)
    untimed = schema.replace(sequence={"time": None}, split=SequenceSplit())
    assert untimed.with_ages(reads_ages=True) == untimed


def test_features_without_ages_are_stored_as_before(schema: Schema) -> None:
    assert "ages" not in schema.to_dict()["features"][0]
    assert "ages" not in schema.describe()["features"][0]


def test_targets_are_parsed_as_items(schema: Schema) -> None:
    assert schema.integers == ("who", "film", "target", "seen")


def test_events_have_columns_and_form_of_log(schema: Schema) -> None:
    expected = Schema(
        label=None,
        sparse=("who", "film", "action"),
        timestamp="at",
        integers=("who", "film"),
    )
    assert schema.events == expected
    assert schema.events.format == "csv"


def test_events_have_no_order_of_built_lists(schema: Schema) -> None:
    assert schema.replace(header=(), header_row=True).events.header is None
    assert schema.replace(header=("who", "film", "at")).events.header == ("who", "film", "at")


def test_description_restores_schema(schema: Schema) -> None:
    assert Schema.described(schema.describe()) == schema


def test_older_schemas_are_described_as_before() -> None:
    stored = Schema(label=None, sparse=("user", "item")).to_dict()
    assert not {"sequence", "split"} & stored.keys()


def test_new_length_changes_lists(schema: Schema) -> None:
    shorter = schema.replace(sequence={"max_length": 5})
    assert shorter.feature("action") == Feature(name="action", max_length=6, aligned_with="film")


def test_default_split_is_by_last_items() -> None:
    schema = Schema(label=None, sequence=SequenceColumns(user="u", item="i"))
    assert schema.split == SequenceSplit(kind="last_items", validation=1, test=1)


def test_durations_are_in_microseconds() -> None:
    sizes = SequenceSplit(kind="time", validation="12h", test="60d").sizes
    assert sizes == (12 * 3600 * 10**6, 60 * 86_400 * 10**6)


def test_user_input_adds_column_of_users(schema: Schema) -> None:
    with_user = schema.replace(sequence={"user_input": True})
    assert with_user.sparse == (*schema.sparse, "who")
    assert with_user.lists == schema.lists
    assert with_user.events == schema.events
    assert Schema.described(with_user.describe()) == with_user
    assert with_user.replace(sparse=with_user.sparse) == with_user
    assert "user_input" not in schema.to_dict()["sequence"]


def test_percentage_of_files_returns_millionths() -> None:
    sizes = [
        SequenceSplit(kind="files", validation=share).sizes for share in ("5%", "0.25%", 0, "0")
    ]
    assert sizes == [(50_000, 1), (2500, 1), (0, 1), (0, 1)]
    assert SequenceSplit(kind="files", validation="5%", test=0).sizes == (50_000, 0)


EVENTS = "label: null\nsequence: {user: u, item: i, time: t}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("sequence: {user: u, item: i}", "Set label: null", id="label"),
        pytest.param(EVENTS + "dense: [x]", "dense must be empty with sequence", id="dense"),
        pytest.param(EVENTS + "sparse: [x]", "sparse names x, which sequence", id="sparse"),
        pytest.param(
            EVENTS + "features: [{name: i, max_length: 3}]",
            "set max_length of sequence",
            id="length",
        ),
        pytest.param("label: null\nsequence: {user: u, item: target}", "rename it", id="target"),
        pytest.param("label: null\nsequence: {user: age, item: i}", "rename it", id="age"),
        pytest.param(
            "label: null\nsequence: {user: u, item: i, time: age}",
            "rename it",
            id="time",
        ),
        pytest.param("label: null\nsequence: {user: u, item: u}", "different columns", id="twice"),
        pytest.param("label: null\nsequence: {user: u}", "sequence.item: Seq", id="no item"),
        pytest.param(
            "label: null\nsequence: {user: u, item: i}\nsplit: {kind: time, test: 1d, validation: "
            "1d}",
            "sequence has no time",
            id="no time",
        ),
        pytest.param(EVENTS + "split: {kind: last}", "SequenceSplit.kind", id="kind"),
        pytest.param(EVENTS + "split: {kind: time}", "a duration such as 60d", id="duration"),
        pytest.param(
            EVENTS + "split: {kind: time, test: 5 days, validation: 1d}",
            "got '5 days'",
            id="unit",
        ),
        pytest.param(
            EVENTS + "split: {kind: files, validation: 5%}",
            "split files: sequence must have no time, got t",
            id="files with time",
        ),
        pytest.param(EVENTS + "split: {kind: files}", "a percentage such as 5%, or 0", id="files"),
        pytest.param(
            EVENTS + "split: {kind: files, validation: 100%}",
            "got '100%'",
            id="all for validation",
        ),
        pytest.param(EVENTS + "split: {validation: 0}", "a number of items, got 0", id="none"),
        pytest.param("label: null\nsparse: [a]\nsplit: {test: 1}", "needs sequence", id="split"),
        pytest.param(EVENTS + "tokens: hexadecimal", "needs tokens: any", id="tokens"),
    ],
)
def test_invalid_events_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_schema(text, "events.yaml")
