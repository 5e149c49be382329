"""Nearest rows against all products in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.evaluate import nearest
from selftask.evaluate.features import FileRows

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])


def _features(num: int, seed: int, dim: int = 13) -> Tensor:
    """Draw features of five classes."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.eye(5, dim)[torch.randint(5, (num,), generator=generator)]
    return centers + torch.randn(num, dim, generator=generator) * 0.7


def _none(queries: Tensor) -> Tensor:
    return torch.full((len(queries),), -1)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Make a first pass on every CPU, in small blocks; return the data types of all products."""
    products, dtypes = nearest._products, []

    def noted(queries: Tensor, block: Tensor) -> Tensor:
        dtypes.append(queries.dtype)
        return products(queries, block)

    monkeypatch.setattr(nearest, "_products", noted)
    monkeypatch.setattr(nearest, "_BLOCK", 1000)
    monkeypatch.setattr(nearest, "computes_in_bfloat16", lambda: True)
    return dtypes


def _check(bank: nearest.Bank, features: Tensor, queries: Tensor, left_out: Tensor) -> None:
    """Compare 20 neighbors with those of float64; equally near ones may be exchanged."""
    cosine, row = bank.nearest(queries, 20, left_out)
    exact = queries.double() @ F.normalize(features.double()).T
    for number, skipped in enumerate(left_out.tolist()):
        if skipped >= 0:
            exact[number, skipped] = -torch.inf
    torch.testing.assert_close(cosine.double(), exact.topk(20).values, rtol=0, atol=2e-6)
    torch.testing.assert_close(exact.gather(1, row), exact.topk(20).values, rtol=0, atol=2e-6)
    assert all(len(set(rows)) == 20 for rows in row.tolist())


@DTYPES
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_are_those_of_float64(
    dtype: torch.dtype, leave_one_out: bool, passes: list[torch.dtype]
) -> None:
    features = _features(5_003, 3)
    queries = F.normalize(features[:200] if leave_one_out else _features(200, 4))
    left_out = torch.arange(200) if leave_one_out else _none(queries)
    _check(nearest.Bank(features, first_pass=dtype), features, queries, left_out)
    assert dtype in passes


def test_need_no_first_pass(passes: list[torch.dtype]) -> None:
    features, queries = _features(5_003, 3), F.normalize(_features(9, 4))
    _check(nearest.Bank(features), features, queries, _none(queries))
    assert set(passes) == {torch.float32}


@DTYPES
def test_that_the_first_pass_cannot_tell_apart(
    dtype: torch.dtype, passes: list[torch.dtype]
) -> None:
    """Rows of a cluster differ by 1e-4, much less than the rounding errors."""
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(100, 1, 13, generator=generator)
    features = (centers + 1e-4 * torch.randn(100, 50, 13, generator=generator)).flatten(0, 1)
    queries = F.normalize(centers[:, 0])
    exact = queries.double() @ F.normalize(features.double()).T
    rounded = (queries.bfloat16() @ F.normalize(features).bfloat16().T).topk(20).indices
    same = [np.isin(*pair).mean() for pair in zip(rounded, exact.topk(20).indices, strict=True)]
    assert np.mean(same) < 0.9
    _check(nearest.Bank(features, first_pass=dtype), features, queries, _none(queries))
    assert dtype in passes


@DTYPES
def test_among_equal_rows(dtype: torch.dtype, passes: list[torch.dtype]) -> None:
    features = torch.ones(3_000, 13)
    features[7] = -1
    queries, bank = F.normalize(features[:100]), nearest.Bank(features, first_pass=dtype)
    _check(bank, features, queries, torch.arange(100))
    assert {dtype, torch.float32} == set(passes)
    passes.clear()
    _check(bank, features, queries, torch.arange(100))
    assert {torch.float32} == set(passes), "a first pass is useless here"


@DTYPES
def test_with_one_large_feature(dtype: torch.dtype, passes: list[torch.dtype]) -> None:
    """As in some transformers; the others fill few of the 127 steps of int8."""
    features, queries = _features(4_000, 3), _features(100, 4)
    features[:, 0] *= 200
    queries[:, 0] *= 200
    _check(nearest.Bank(features, first_pass=dtype), features, F.normalize(queries), _none(queries))
    assert dtype in passes


@DTYPES
@pytest.mark.parametrize("power", [1.0, 3.0])  # of the features: light and heavy tails
def test_margin_covers_rounding_errors(dtype: torch.dtype, power: float) -> None:
    features, queries = (
        F.normalize(drawn.sign() * drawn.abs() ** power)
        for drawn in (_features(2_000, 5, dim=256), _features(300, 6, dim=256))
    )
    rounded = nearest._Rounded.of(features, dtype)
    of_queries, margin = rounded.round(queries)
    products = nearest._products(of_queries, rounded.rows).double()
    unit = rounded.unit * nearest._unit(queries, dtype)
    exact = queries.double() @ (features - features.mean(dim=0)).double().T / unit
    errors = (products - exact).abs()
    allowed = (exact - margin.below(exact.float())) / 2
    assert (errors <= allowed).all()
    assert errors.max() > 0.05 * allowed.min(), "the margin is far too wide"


def test_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "_BLOCK", 300)
    features, queries = _features(1_000, 3), F.normalize(_features(50, 4))
    np.save(tmp_path / "features.npy", features.numpy())
    bank = nearest.Bank(FileRows.of(tmp_path / "features.npy"))
    _check(bank, features, queries, _none(queries))
    units = F.normalize(features.double())
    others = (units @ units.T).fill_diagonal_(-1).amax(dim=1)
    torch.testing.assert_close(bank.nearest_others()[0].double(), others, rtol=0, atol=1e-6)
