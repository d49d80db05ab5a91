"""Tables as people have them: the folder `awkward`, and what must come out of each file."""

from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from opvi.adapters._tables import Encoded, Reading, Schema, TableError, infer_schema, open_source
from tests.app.awkward import write

FOLDER = Path(write.__file__).parent
FEATURES = [
    *("day: hour sin", "day: hour cos", "day: weekday sin", "day: weekday cos", "day: year sin", "day: year cos"),
    *("amount", "share", "count", "shop=Nord", "shop=Süd", "shop=West"),
]
ALIKE = [name for name in write.tables() if name not in write.others()]


def read(name: str, **options) -> tuple[Schema, Encoded, list[str]]:
    """A file's schema, rows and what the user is told of it."""
    with open_source(FOLDER / f"{name}.csv") as source:
        blocks = list(source.blocks())
        reading = options.pop("reading", Reading())._replace(semicolons=source.semicolons)
        schema = infer_schema(blocks, "y", reading=reading, **options)
        return schema, schema.encode(blocks[0]), [*source.notes, *schema.notes]


def test_the_files_are_those_that_are_written() -> None:
    for name, content in write.tables().items():
        assert (FOLDER / f"{name}.csv").read_bytes() == content


@pytest.mark.parametrize("name", ALIKE)
def test_forty_rows_mean_the_same_in_every_spelling(name: str) -> None:
    """The numbers are those that the rows were written from."""
    options = {"nines": Reading(na=("-999", "unknown")), "cases": Reading(fold=True)}
    schema, out, told = read(name, reading=options.get(name, Reading()))
    rows = write.rows()
    assert out.rejected == []
    assert schema.task == "regression"
    np.testing.assert_allclose(out.y, [row["y"] for row in rows], rtol=1e-6)
    table = dict(zip(FEATURES, out.x.T, strict=True)) if len(schema.features) == len(FEATURES) else None
    if name in ("errors", "question_marks", "nines"):  # gaps in two columns, said in columns of their own
        table = dict(zip(schema.features, out.x.T, strict=True))
        there = np.arange(40) % 7 != 3
        np.testing.assert_array_equal(table["share is missing"], ~there)
        np.testing.assert_array_equal(table["count is missing"], ~there)
    else:
        assert table is not None
        there = np.ones(40, bool)
    turns = [2 * np.pi * (row["day"].hour + row["day"].minute / 60) / 24 for row in rows]
    turns_of_week = [2 * np.pi * row["day"].weekday() / 7 for row in rows]
    np.testing.assert_allclose(table["day: weekday cos"], np.cos(turns_of_week), atol=1e-6)
    np.testing.assert_allclose(table["day: hour sin"], np.sin(turns), atol=1e-6)
    np.testing.assert_allclose(table["amount"], [row["amount"] for row in rows], rtol=1e-6)
    for column in ("share", "count"):
        np.testing.assert_allclose(table[column][there], np.array([row[column] for row in rows])[there], rtol=1e-6)
    for shop in ("Nord", "Süd", "West"):
        np.testing.assert_array_equal(table[f"shop={shop}"], [row["shop"] == shop for row in rows])
    if name == "plain":
        assert told == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "german",
            "numbers are read as 1.234,5 in 'y', 'amount', 'share', 'count'; dates as day, month, year in 'day'",
        ),
        ("french", "1 234,5"),
        ("us_money", "currency and percent signs are left off in 'y', 'amount'"),
        ("us", "month, day, year"),
        ("latin1", "is read as cp1252"),
        ("utf16_big_endian", "is read as utf-16"),
    ],
)
def test_a_line_says_what_was_found_and_how_to_change_it(name: str, said: str) -> None:
    told = read(name)[2]
    assert any(said in line for line in told)
    assert any("If that is wrong: --decimal, --thousands, --date-format" in line for line in told)


def test_yes_and_no_are_two_levels_however_they_are_written() -> None:
    schema, out, _ = read("yes_no")
    assert schema.features == ["member=no", "member=yes", "x"]
    np.testing.assert_array_equal(out.x[:, 1], [bool(i % 3) for i in range(60)])


def test_whole_numbers_above_2_to_53_are_classes_of_their_own() -> None:
    schema, out, _ = read("big_integers")
    assert schema.classes == [str(2**53 + i) for i in range(3)]
    assert out.y.tolist() == [i % 3 for i in range(60)]


def test_labels_are_kept_as_written() -> None:
    schema, out, _ = read("leading_zeros")
    assert schema.classes == ["000", "001", "002"]
    assert out.y.tolist() == [i % 3 for i in range(60)]


def test_long_identifiers_are_left_out() -> None:
    schema, out, told = read("long_ids")
    assert schema.features == ["x"]
    assert (len(out.y), told) == (60, ["column 'id' left out: every value differs"])


def test_a_word_among_numbers_costs_its_row() -> None:
    _, out, told = read("mixed")
    assert [(one.row, one.reason) for one in out.rejected] == [(7, "column 'x': 'oops' is not a number")]
    assert "taken as numbers" in told[0]


def test_quotes_and_ends_of_lines_inside_a_field() -> None:
    schema, out, _ = read("quoted_lines")
    assert schema.features == ['note=a "0",\nb', 'note=a "1",\nb', 'note=a "2",\nb', "x"]
    assert len(out.y) == 60


def test_plus_and_minus_are_labels_not_gaps() -> None:
    schema, out, _ = read("plus_minus")
    assert schema.features == ["x", "sign=+", "sign=-"]
    np.testing.assert_array_equal(out.x[:, 2], [i % 2 for i in range(60)])


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (Reading(decimal=";"), "decimal sign is ';'"),
        (Reading(thousands="x"), "thousands separator is 'x'"),
        (Reading(decimal=",", thousands=","), "cannot be both the decimal and"),
        (Reading(dates="dd.mm"), "dmy, mdy, ymd, or a pattern"),
    ],
)
def test_spellings_that_cannot_be_are_refused(reading: Reading, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read("plain", reading=reading)


def test_what_the_user_says_is_not_guessed(tmp_path: Path) -> None:
    """`1.234` and `03/04/2024` mean two things; without a hint the plain ones."""
    path = tmp_path / "a.csv"
    lines = [f"{1 + i % 9}.{100 + i},0{1 + i % 9}/04/2024,2024{i % 12 + 1:02d}15,{i}\n" for i in range(40)]
    path.write_text("a,day,when,y\n" + "".join(lines))

    def column(name: str, **options) -> np.ndarray:
        with open_source(path) as source:
            blocks = list(source.blocks())
            schema = infer_schema(blocks, "y", reading=Reading(**options))
            return schema.encode(blocks[0]).x[:, schema.features.index(name)]

    plain = np.array([1 + i % 9 + (100 + i) / 1000 for i in range(40)])
    np.testing.assert_allclose(column("a"), plain, rtol=1e-6)
    np.testing.assert_allclose(column("a", thousands="."), 1000 * plain, rtol=1e-6)
    np.testing.assert_allclose(column("a", decimal=","), 1000 * plain, rtol=1e-6)
    weekday = lambda *days: [np.sin(2 * np.pi * day.weekday() / 7) for day in days]  # noqa: E731
    first = weekday(*(date(2024, 4, 1 + i) for i in range(3)))
    np.testing.assert_allclose(column("day: weekday sin", dates="dmy")[:3], first, atol=1e-6)
    first = weekday(*(date(2024, 1 + i, 4) for i in range(3)))
    np.testing.assert_allclose(column("day: weekday sin", dates="mdy")[:3], first, atol=1e-6)
    first = weekday(*(date(2024, 1 + i, 15) for i in range(3)))
    np.testing.assert_allclose(column("when: weekday sin", dates="%Y%m%d")[:3], first, atol=1e-6)


@pytest.mark.parametrize("in_order", [True, False])
def test_season_counts_once_a_year_has_passed_and_trend_where_rows_are_in_no_order(tmp_path: Path, in_order) -> None:
    path = tmp_path / "a.csv"
    places = np.arange(900) if in_order else np.random.default_rng(0).permutation(900)
    days = [date(2021, 3, 1) + timedelta(days=i) for i in places.tolist()]
    path.write_text("day,y\n" + "".join(f"{day},{i % 50}\n" for i, day in enumerate(days)))
    with open_source(path) as source:
        (block,) = source.blocks()
    schema = infer_schema([block], "y")
    table = dict(zip(schema.features, schema.encode(block).x.T, strict=True))
    year = 365.2425
    late = places >= year
    assert ("day: days" in table) == (not in_order)  # forgetting follows a trend by itself
    if not in_order:
        np.testing.assert_allclose(table["day: days"], np.where(late, places - year, 0), rtol=1e-5)
    turns = np.array([2 * np.pi * (day - date(2000, 1, 1)).days / year for day in days])
    np.testing.assert_allclose(table["day: year sin"], np.where(late, np.sin(turns), 0), atol=1e-5)
    np.testing.assert_allclose(table["day: year cos"], np.where(late, np.cos(turns), 0), atol=1e-5)
    assert np.ptp(table["day: weekday sin"][:7]) > 1
    column = {name: value for name, value in schema.to_json()["columns"][0].items() if name != "trend"}
    old = {**schema.to_json(), "columns": [{**column, "late": False}], "features": ["day: days", *schema.features[-4:]]}
    before = Schema.from_json({**old, "origin": ["day"] * 5}).encode(block).x  # as a run of before goes on
    np.testing.assert_allclose(before[:, 0], places, rtol=1e-6)


def test_numbers_that_rise_from_row_to_row_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = {
        "order": 1000 + np.cumsum(rng.integers(1, 5, 300)),
        "counter": np.cumsum(rng.random(300)).round(3),
        "sorted": np.sort(rng.integers(0, 50, 300)),
    }
    path = tmp_path / "a.csv"
    lines = [f"{a},{b},{c},{y}" for a, b, c, y in zip(*table.values(), rng.random(300), strict=True)]
    path.write_text("\n".join([",".join([*table, "y"]), *lines]))
    with open_source(path) as source:
        blocks = list(source.blocks())
    assert infer_schema(blocks, "y").features == ["counter", "sorted"]
    assert infer_schema(blocks, "y", rows=150).features == ["order", "counter", "sorted"]  # too few to tell


def test_a_schema_is_written_and_read_with_its_spellings() -> None:
    schema, out, _ = read("german", reading=Reading(na=("-999",), fold=True))
    again = Schema.from_json(schema.to_json())
    assert again == schema
    with open_source(FOLDER / "german.csv") as source:
        np.testing.assert_array_equal(again.encode(next(source.blocks())).x, out.x)
    old = {key: value for key, value in read("plain")[0].to_json().items() if key not in ("spelling", "positive")}
    old["columns"] = [{k: v for k, v in column.items() if k != "spelling"} for column in old["columns"]]
    assert Schema.from_json(old) == read("plain")[0]  # as it was written before there were spellings
