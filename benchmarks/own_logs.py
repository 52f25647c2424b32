"""Logs of the `own-logs` benchmark: generated ones, which resemble known tables, and samples of
public ones.
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from movielens_benchmark import tables_of

from rayrec.schema import Schema

Columns = dict[str, Any]


@dataclass(frozen=True)
class Log:
    """A log's rows for training, in log order, and its held-out rows."""

    train: pd.DataFrame
    test: pd.DataFrame
    schema: Schema


def logit_draw(logits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return labels with these logits, int8 [rows]."""
    return (random.random(len(logits)) < 1 / (1 + np.exp(-logits))).astype(np.int8)


def standard(values: np.ndarray) -> np.ndarray:
    """Return values with mean 0 and deviation 1."""
    return (values - values.mean()) / values.std()


def _split(columns: Columns, logits: np.ndarray, rows: int, random: np.random.Generator) -> Log:
    """Return the first `rows` rows for training. Columns of text are categories."""
    labels = logit_draw(logits, random)
    table = pd.DataFrame({"label": labels, **columns})
    sparse = tuple(name for name in columns if not pd.api.types.is_numeric_dtype(table[name]))
    dense = tuple(name for name in columns if name not in sparse)
    schema = Schema(label="label", dense=dense, sparse=sparse, tokens="any", nan="missing")
    return Log(table[:rows], table[rows:].reset_index(drop=True), schema)


def _names(prefix: str, codes: np.ndarray) -> np.ndarray:
    return np.char.add(prefix, codes.astype(str)).astype(object)


def _zipf(random: np.random.Generator, count: int, rows: int, power: float = 1.0) -> np.ndarray:
    """Return codes below `count`, whose frequencies fall by a power of their rank, int64 [rows]."""
    weights = np.arange(1, count + 1) ** -power
    return random.choice(count, rows, p=weights / weights.sum())


def census(seed: int) -> Log:
    """Return rows like the census of 1994: ages, hours, capital gains that are mostly 0, education,
    work and families, some missing. A quarter earns more.
    """
    random = np.random.default_rng([seed, 1])
    train, rows = 30_000, 45_000
    skill = random.normal(size=rows)
    age = np.clip(17 + random.gamma(3.2, 7.2, rows), 17, 90).round()
    schooling = np.clip(np.round(10 + 2.4 * skill + random.normal(0, 1.2, rows)), 1, 16)
    male = random.random(rows) < 0.67
    married = random.random(rows) < 1 / (1 + np.exp(-(age - 33) / 5)) * np.where(male, 0.75, 0.4)
    family = np.where(
        married,
        np.where(male, 0, 1),
        np.where(age < 26, 2, random.integers(3, 6, rows)),
    )
    job = np.clip(np.round(schooling / 1.4 + random.normal(0, 2, rows)), 0, 13).astype(int)
    sector = _zipf(random, 8, rows, 1.6)
    hours = np.where(random.random(rows) < 0.47, 40, random.normal(40 + 3 * male, 12, rows))
    hours = np.clip(hours.round() - 12 * ((age < 22) | (age > 66)), 1, 99)
    has_gain = random.random(rows) < 0.05 + 0.05 * (skill > 0.6)
    gain = np.where(has_gain, np.exp(random.normal(8.4, 1.0, rows)).round(), 0.0)
    has_loss = ~has_gain & (random.random(rows) < 0.047)
    loss = np.where(has_loss, random.normal(1870, 370, rows).clip(155).round(), 0.0)
    country = np.where(random.random(rows) < 0.9, 0, 1 + _zipf(random, 40, rows))
    weight = np.exp(random.normal(12.0, 0.55, rows)).round()
    job_effect = np.random.default_rng(11).normal(0, 0.5, 14)
    logits = (
        -4.0
        + 2.3 * married
        + 0.34 * (schooling - 10)
        + 1.6 * np.exp(-(((age - 50) / 15) ** 2))
        + 0.9 * np.tanh((hours - 42) / 9)
        + job_effect[job]
        + np.where(gain > 7000, 5.0, np.where(gain > 0, -1.2, 0.0))
        + np.where((loss > 1820) & (loss < 2000), 2.2, np.where(loss > 0, -0.5, 0.0))
        + 0.5 * (sector == 3)
        + 0.5 * married * (schooling > 12)
        - 0.4 * (country > 0)
        + 0.3 * skill
    )
    missing = random.random(rows) < 0.056
    columns = {
        "age": age,
        "weight": weight,
        "schooling": schooling,
        "gain": gain,
        "loss": loss,
        "hours": hours,
        "sector": np.where(missing, "", _names("sector", sector)),
        "job": np.where(missing, "", _names("job", job)),
        "family": _names("family", family),
        "sex": np.where(male, "male", "female").astype(object),
        "married": np.where(married, "yes", "no").astype(object),
        "country": np.where(random.random(rows) < 0.02, "", _names("country", country)),
    }
    return _split(columns, logits, train, random)


def bank(seed: int) -> Log:
    """Return rows like a bank's calls: balances of both signs, skewed durations, days since the
    last call or -1, months. One in nine agrees.
    """
    random = np.random.default_rng([seed, 2])
    train, rows = 6_000, 26_000
    age = np.clip(random.gamma(9, 4.6, rows), 18, 95).round()
    balance = (np.sinh(random.normal(2.6, 1.6, rows)) * 40 - 150).round()
    duration = np.exp(random.normal(5.2, 0.85, rows)).round()
    calls = random.geometric(0.36, rows).clip(1, 50).astype(float)
    was_called = random.random(rows) < 0.18
    since = np.where(was_called, random.normal(220, 100, rows).clip(1).round(), -1.0)
    month = random.choice(12, rows, p=np.array([3, 6, 1, 7, 30, 12, 15, 14, 1, 2, 8, 1]) / 100)
    outcome = np.where(was_called, random.choice(3, rows, p=[0.6, 0.22, 0.18]), 3)
    job = _zipf(random, 12, rows, 0.7)
    flags = {name: random.random(rows) < p for name, p in (("housing", 0.55), ("loan", 0.16))}
    month_effect = np.array([-0.5, 0, 1.5, 0.3, -0.5, 0.1, -0.4, -0.3, 1.3, 1.1, -0.4, 1.2])
    logits = (
        -2.4
        + 1.25 * (np.log(duration) - 5.2)
        + 0.6 * (duration > 600)
        + month_effect[month]
        + np.array([0.1, 0.4, 2.4, 0.0])[outcome]
        - 0.7 * flags["housing"]
        - 0.5 * flags["loan"]
        - 0.12 * calls
        + 0.9 * ((age > 60) | (age < 25))
        + 0.15 * np.arcsinh(balance / 500)
        + np.random.default_rng(12).normal(0, 0.25, 12)[job]
        + 0.8 * (flags["housing"] & (since > 300))
    )
    columns = {
        "age": age,
        "balance": balance,
        "duration": duration,
        "calls": calls,
        "since": since,
        "day": random.integers(1, 32, rows).astype(float),
        "month": _names("m", month),
        "outcome": _names("o", outcome),
        "job": _names("j", job),
        **{name: np.where(flag, "yes", "no").astype(object) for name, flag in flags.items()},
    }
    return _split(columns, logits, train, random)


def higgs(seed: int) -> Log:
    """Return rows like HIGGS: 21 low-level numbers of a decay with four jets, measured with noise,
    and 7 masses derived from them. All are numbers.
    """
    random = np.random.default_rng([seed, 3])
    train, rows = 7_000, 27_000
    signal = random.random(rows) < 0.53
    columns: Columns = {}
    # Momenta, directions and tags of a lepton, the missing energy and four jets
    momenta = random.gamma(2.2, 0.45, (rows, 6))
    angles = random.uniform(-np.pi, np.pi, (rows, 6))
    eta = random.normal(0, 1.0, (rows, 6))
    resonance = random.normal(np.where(signal, 1.0, 1.25), np.where(signal, 0.13, 0.5))
    opening = np.abs(angles[:, 2] - angles[:, 3]).clip(0.3, 2 * np.pi - 0.3)
    spread = np.cosh(eta[:, 2] - eta[:, 3]).clip(1, 8) - np.cos(opening)
    momenta[:, 2] = (resonance**2 / spread / momenta[:, 3].clip(0.15)).clip(0.1, 8)
    tags = random.random((rows, 4)) < np.where(signal, 0.56, 0.44)[:, None]
    noisy = momenta * np.exp(random.normal(0, 0.12, momenta.shape))
    parts = ("lepton", "missing", "jet1", "jet2", "jet3", "jet4")
    for number, part in enumerate(parts):
        columns[f"{part}_pt"] = noisy[:, number]
        columns[f"{part}_phi"] = angles[:, number]
        if part != "missing":
            columns[f"{part}_eta"] = eta[:, number] + random.normal(0, 0.05, rows)
        if number > 1:
            columns[f"{part}_tag"] = np.where(tags[:, number - 2], 2.17, 0.0)

    def mass(first: int, second: int) -> np.ndarray:
        angle = np.cos(angles[:, first] - angles[:, second])
        hyperbolic = np.cosh((eta[:, first] - eta[:, second]).clip(-2.5, 2.5))
        product = noisy[:, first] * noisy[:, second] * (hyperbolic - angle)
        return np.sqrt(product.clip(1e-3)) * np.exp(random.normal(0, 0.1, rows))

    pairs = ((2, 3), (2, 4), (3, 4), (0, 1), (4, 5), (0, 2))
    for first, second in pairs:
        columns[f"m_{parts[first]}_{parts[second]}"] = mass(first, second)
    columns["m_all"] = mass(2, 3) + mass(4, 5) + random.normal(0, 0.3, rows).clip(-1, 1)
    columns = {name: values.astype(np.float32) for name, values in columns.items()}
    table = pd.DataFrame({"label": signal.astype(np.int8), **columns})
    schema = Schema(label="label", dense=tuple(columns), sparse=(), tokens="any")
    return Log(table[:train], table[train:].reset_index(drop=True), schema)


def numeric(seed: int) -> Log:
    """Return rows of 14 numbers: smooth, skewed, periodic and with steps, some with gaps."""
    random = np.random.default_rng([seed, 4])
    train, rows = 20_000, 40_000
    z = random.normal(size=(rows, 14))
    z[:, 1] = 0.6 * z[:, 0] + 0.8 * z[:, 1]
    gaps = random.random((rows, 14)) < np.array([0.1, 0.2, *[0.0] * 12])
    logits = (
        0.7 * z[:, 0]
        - 0.5 * np.abs(z[:, 1])
        + 0.8 * np.sin(2 * z[:, 2])
        + 0.9 * (z[:, 3] > 0.7)
        + 0.8 * z[:, 4] * z[:, 5]
        + 0.6 * np.maximum(z[:, 6], z[:, 7])
        - 0.8 * ((z[:, 8] > 0) & (z[:, 9] < 0.3))
        + 0.5 * z[:, 10]
        + 0.7 * gaps[:, 1]
    )
    values = z.copy()
    values[:, 6] = np.exp(1.5 * z[:, 6])
    values[:, 7] = np.exp(1.5 * z[:, 7])
    values[:, 10] = np.where(z[:, 10] > 0, np.round(np.exp(2 * z[:, 10])), 0)
    values[:, 11] = np.round(10 * z[:, 11])
    values[:, 12] = 1.7e9 + 86400 * 7 * random.random(rows)
    values[gaps] = np.nan
    return _split({f"n{i}": values[:, i] for i in range(14)}, logits, train, random)


def categorical(seed: int) -> Log:
    """Return rows of eight categories, from 4 to 5,000 values, with an effect each."""
    random = np.random.default_rng([seed, 5])
    train, rows = 30_000, 50_000
    logits = np.full(rows, -1.2)
    columns: Columns = {}
    for number, count in enumerate((4, 12, 30, 80, 200, 800, 2_000, 5_000)):
        codes = _zipf(random, count, rows, 0.9)
        logits += np.random.default_rng([13, number]).normal(0, 0.45, count)[codes]
        columns[f"c{number}"] = _names("v", codes)
    return _split(columns, logits, train, random)


def crossed(seed: int) -> Log:
    """Return rows whose label depends on pairs of categories, pairs of numbers, and both."""
    random = np.random.default_rng([seed, 6])
    train, rows = 30_000, 50_000
    sizes = (8, 20, 60, 300)
    codes = [_zipf(random, count, rows, 0.6) for count in sizes]
    truth = np.random.default_rng(14)
    numbers = random.normal(size=(rows, 4))
    latent = [truth.normal(size=(count, 3)) for count in sizes]
    logits = (
        -0.8
        + 0.45 * (latent[0][codes[0]] * latent[1][codes[1]]).sum(1)
        + 0.3 * (latent[2][codes[2]] * latent[3][codes[3]]).sum(1)
        + truth.normal(0, 0.7, 8)[codes[0]] * numbers[:, 0]
        + 0.7 * numbers[:, 1] * numbers[:, 2]
        + 0.3 * truth.normal(size=60)[codes[2]]
    )
    columns = {f"c{i}": _names("v", codes[i]) for i in range(4)}
    columns |= {f"n{i}": numbers[:, i] for i in range(4)}
    return _split(columns, logits, train, random)


def drifting(seed: int) -> Log:
    """Return rows in time order over 35 days, whose effects change and whose items are replaced.
    The last fifth is held out.
    """
    random = np.random.default_rng([seed, 7])
    rows = 40_000
    time = np.sort(random.random(rows))
    age = time * 35
    item = (_zipf(random, 400, rows, 0.8) + (age * 12).astype(int)) % 900
    user = _zipf(random, 1_500, rows, 0.7)
    region = _zipf(random, 25, rows)
    price = np.exp(random.normal(3 + 0.4 * time, 0.9))
    truth = np.random.default_rng(15)
    logits = (
        -1.4
        + truth.normal(0, 0.9, 900)[item]
        + truth.normal(0, 0.8, 1_500)[user]
        + truth.normal(0, 0.5, 25)[region] * (1 - time)
        + (0.8 - 1.2 * time) * standard(np.log(price))
        + 0.5 * np.sin(2 * np.pi * age)
    )
    columns = {
        "time": (1.7e9 + age * 86400).round(),
        "hour": ((age % 1) * 24).astype(int).astype(float),
        "price": price.round(2),
        "item": _names("i", item),
        "user": _names("u", user),
        "region": _names("p", region),
    }
    return _split(columns, logits, rows * 4 // 5, random)


def criteo(path: str) -> Log:
    """Return a sample of Criteo's log (gzip), with named columns. The last seventh is held out."""
    dense = [f"i{i}" for i in range(1, 14)]
    sparse = [f"c{i}" for i in range(1, 27)]
    with gzip.open(path, "rt") as file:
        table = pd.read_csv(
            file, sep="\t", names=["label", *dense, *sparse], dtype=dict.fromkeys(sparse, str)
        )
    table[sparse] = table[sparse].fillna("")
    table[dense] = table[dense].astype(float)
    rows = len(table) * 6 // 7
    schema = Schema(
        label="label", dense=tuple(dense), sparse=tuple(sparse), tokens="any", nan="missing"
    )
    return Log(table[:rows], table[rows:].reset_index(drop=True), schema)


def movielens(package: str, seed: int, *, sides: bool) -> Log:
    """Return MovieLens-100K of RecBole's package in an order drawn from `seed`; a rating of at
    least 4 is a click. `sides`: with the columns of users and films. A fifth is held out.
    """
    ratings, users, films = tables_of(package)
    table = ratings.merge(users, on="user_id").merge(
        films[["item_id", "release_year", "class"]], on="item_id"
    )
    table["label"] = (table["rating"].astype(float) >= 4).astype(np.int8)
    table["age"] = table["age"].astype(float)
    table["release_year"] = pd.to_numeric(table["release_year"], errors="coerce")
    table["time"] = table["timestamp"].astype(float)
    table["genres"] = table["class"].fillna("").str.replace(" ", "|")
    dense = ("age", "release_year", "time") if sides else ()
    more = ("gender", "occupation", "zip_code", "genres") if sides else ()
    sparse = ("user_id", "item_id", *more)
    order = np.random.default_rng(seed).permutation(len(table))
    table = table[["label", *dense, *sparse]].iloc[order].reset_index(drop=True)
    rows = len(table) * 4 // 5
    schema = Schema(
        label="label",
        dense=dense,
        sparse=sparse,
        lists=("genres",) if sides else (),
        tokens="any",
        nan="missing",
    )
    return Log(table[:rows], table[rows:].reset_index(drop=True), schema)


GENERATED: Final[dict[str, Callable[[int], Log]]] = {
    "census": census,
    "bank": bank,
    "higgs": higgs,
    "numeric": numeric,
    "categorical": categorical,
    "crossed": crossed,
    "drifting": drifting,
}
"""Generators of logs from a seed, by name."""
