"""Small click model that looks up a side table of items."""

from pathlib import Path

from builders.click_models import hashed_preprocessor, make_model

from rayrec.data.features.lookups import with_contents
from rayrec.inference.model import ServedModel
from rayrec.schema import Feature, NamedTable, Schema

FEATURES = (
    Feature(name="category", formula="lookup(items, item, category)"),
    Feature(name="price", formula="number(lookup(items, item, price))"),
)


def write_items(path: Path, factor: int) -> str:
    """Write a table of five items, with other values for each factor."""
    rows = (f"{n},c{factor * n % 4},{factor * n}\n" for n in range(5))
    path.write_text("item,category,price\n" + "".join(rows))
    return str(path)


def shop_model(table: str, *, seed: int = 7) -> ServedModel:
    """Return a model that was trained with a table. The seed determines its weights."""
    schema = Schema(
        label="click",
        sparse=("user", "item"),
        header=("click", "user", "item"),
        tables=(NamedTable(name="items", path=table, key="item"),),
        features=FEATURES,
    )
    return make_model(hashed_preprocessor([9, 9, 9], with_contents(schema)), seed=seed)
