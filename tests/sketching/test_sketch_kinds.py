"""Each kind of sketch by itself: right on average, as noisy as its closed form, as large as predicted."""

import math

import pytest
import torch

import lowtide
from lowtide.sketching import rounded
from lowtide.sketching.choice import Choice
from lowtide.sketching.draw import SEED_BYTES, chosen, draw_seed, normals, signs, uniforms
from lowtide.sketching.kinds import KINDS

CPU = torch.empty(0)
F64 = torch.float64
DRAWS = 2000
SIGMAS = 4.0
NO_RATE = [name for name, kind in KINDS.items() if not kind.has_rate]
WITH_RATE = [name for name, kind in KINDS.items() if kind.has_rate]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def layer(rows, features=5, outputs=3, dtype=F64):
    """An input and an output gradient with rows of unequal size that are not independent."""
    x = torch.randn(rows, features, dtype=F64) * torch.rand(rows, 1, dtype=F64) + 0.3
    return x.to(dtype), (torch.randn(rows, outputs, dtype=F64) + 0.2).to(dtype)


def estimate(kind, x, g, k, real=None, seed=None):
    seed = draw_seed(CPU) if seed is None else seed
    return kind.weight_gradient(g, kind.compress(x, seed, k, real), seed, k, real)


def errors(kind, x, g, k, real=None, draws=DRAWS):
    exact = g.t() @ x
    return torch.stack([estimate(kind, x, g, k, real) - exact for _ in range(draws)]).flatten(1)


def deviations(samples, expected):
    """By how many standard errors the mean of samples is off."""
    error = samples.std(0) / math.sqrt(samples.shape[0])
    return ((samples.mean(0) - expected) / error).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [24, 23])
@pytest.mark.parametrize("name", KINDS)
def test_mean_and_variance(name, rows):
    kind, (x, g), k = KINDS[name], layer(rows), 7
    off = errors(kind, x, g, k)
    assert deviations(off, 0) < SIGMAS
    assert deviations((off @ (g.t() @ x).flatten())[:, None], 0) < SIGMAS  # its length, in particular
    law = subsampled_cosines(x, g, k) if name == "dct" else kind.variance(x, g, k)
    assert deviations(off.square().sum(1, keepdim=True), law) < SIGMAS


@pytest.mark.parametrize("rows", [24, 23])
def test_the_law_of_strided_buckets_is_the_mean_over_orders(rows):
    kind, (x, g), k = KINDS["strided"], layer(rows), 7
    orders = [torch.randperm(rows) for _ in range(DRAWS)]
    found = torch.tensor([[kind.variance(x[order], g[order], k)] for order in orders])
    assert deviations(found, kind.variance_law(x, g)(k)) < SIGMAS


def subsampled_cosines(x, g, k):
    """The exact variance of k outputs of a cosine transform with random signs, by sums over pairs of rows."""
    n = x.shape[0]
    at = torch.arange(n, dtype=F64)
    wave = torch.cos(torch.pi * at[:, None] * (2 * at + 1) / (2 * n)) * math.sqrt(2 / n)
    wave[0] /= math.sqrt(2)
    assert torch.allclose(wave @ wave.t(), torch.eye(n, dtype=F64))
    scale = (n / k) ** 2 * k * (n - k) / (n * (n - 1))

    def spread(a, b):
        return scale * ((a * b).sum(0) - a.sum(0) * b.sum(0) / n)

    products, squares = wave[:, :, None] * wave[:, None], wave.square()
    meet = spread(products, products).fill_diagonal_(0)
    together = spread(squares[:, :, None], squares[:, None])
    inner = (x @ x.t()) * (g @ g.t())
    apart = x.square().sum(1)[:, None] * g.square().sum(1)
    return float((meet * (apart + inner)).sum() + (together * inner).sum())


def test_the_law_of_cosines_is_close():
    for rows in (16, 64):
        x, g = layer(rows)
        law, exact = KINDS["dct"].variance(x, g, rows // 4), subsampled_cosines(x, g, rows // 4)
        assert abs(law / exact - 1) < 2 / rows


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_RATE)
def test_rows_that_are_not_real(name):
    """They change no average, and the noise is that of the real rows alone."""
    kind, (x, g), k = KINDS[name], layer(24), 7
    real = torch.rand(24) < 0.6
    g = g * real[:, None]
    off = errors(kind, x, g, k, real)
    assert deviations(off, 0) < SIGMAS
    if name in ("dct", "srht"):  # sketches of fixed length: rows of zeros in place of the others
        x, g = x * real[:, None], g * real[:, None]
    else:
        x, g = x[real], g[real]
    law = subsampled_cosines(x, g, k) if name == "dct" else kind.variance(x, g, k)
    assert deviations(off.square().sum(1, keepdim=True), law) < SIGMAS


@pytest.mark.parametrize("name", ["strided", "rows"])
def test_as_many_kept_as_there_are_real_rows_is_exact(name):
    x, g = layer(24)
    real = torch.zeros(24, dtype=torch.bool)
    real[[3, 5, 6, 17, 20]] = True
    g = g * real[:, None]
    for k in (5, 8):
        torch.testing.assert_close(estimate(KINDS[name], x, g, k, real), g.t() @ x)


@pytest.mark.parametrize("name", ["strided", "rows", "dct", "srht"])
def test_all_rows_kept_is_exact_without_noise(name):
    x, g = layer(16)
    torch.testing.assert_close(estimate(KINDS[name], x, g, 16), g.t() @ x)
    assert KINDS[name].variance(x, g, 16) == pytest.approx(0, abs=1e-9)
    assert KINDS[name].variance_law(x, g)(16) == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_decides(name):
    x, g = layer(24)
    kind, seed = KINDS[name], draw_seed(CPU)
    first = estimate(kind, x, g, 7, seed=seed)
    assert torch.equal(first, estimate(kind, x, g, 7, seed=seed))
    assert not torch.equal(first, estimate(kind, x, g, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_bytes_and_dtypes(name, dtype):
    kind = KINDS[name]
    for rows, features, k in ((24, 5, 7), (23, 512, 23), (1, 3, 1), (9, 4, 1)):
        x, g = layer(rows, features, dtype=dtype)
        kept = kind.compress(x, draw_seed(CPU), k)
        taken = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        assert taken == kind.kept_bytes(rows, features, k, dtype)
        made = estimate(kind, x, g, k)
        assert made.dtype == dtype
        assert made.shape == (3, features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WITH_RATE)
def test_sums_are_not_in_half_precision(name, dtype):
    """Many rows into few: sums of half precision would be off by far more than their rounding at the end."""
    kind, seed = KINDS[name], draw_seed(CPU)
    x, _ = layer(3000, 4, dtype=dtype)
    half, full = (kind.compress(t, seed, 3)[0].double() for t in (x, x.double()))
    assert (half - full).abs().max() <= full.abs().max() * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", KINDS)
def test_other_layouts_are_the_same_numbers(name):
    kind, (x, g), seed = KINDS[name], layer(24), draw_seed(CPU)
    expected = estimate(kind, x, g, 7, seed=seed)
    other = estimate(kind, x.t().contiguous().t(), g.t().contiguous().t(), 7, seed=seed)
    torch.testing.assert_close(other, expected)
    ones = g[:1].expand(24, 3)  # the gradient of a sum
    torch.testing.assert_close(
        estimate(kind, x, ones, 7, seed=seed), estimate(kind, x, ones.contiguous(), 7, seed=seed)
    )


@pytest.mark.parametrize("name", KINDS)
def test_an_input_of_zeros_or_of_one_number(name):
    kind, (x, g) = KINDS[name], layer(24)
    assert torch.equal(estimate(kind, torch.zeros_like(x), g, 7), torch.zeros(3, 5, dtype=F64))
    assert estimate(kind, torch.full_like(x, 2.5), g, 7).isfinite().all()


@pytest.mark.parametrize("name", NO_RATE)
def test_rounding_keeps_what_lies_on_a_level(name):
    x = torch.tensor([[0.0, 255.0, 17.0, 34.0], [-3.0, -3.0, -3.0, -3.0]], dtype=F64)
    g = torch.eye(2, dtype=F64)
    torch.testing.assert_close(estimate(KINDS[name], x, g, 2), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("name", NO_RATE)
def test_slices_of_a_large_input_change_no_bit(name, rows, dtype, monkeypatch):
    kind, (x, g), seed = KINDS[name], layer(rows, 512, dtype=dtype), draw_seed(CPU)
    whole = kind.compress(x, seed, rows)
    expected = kind.weight_gradient(g, whole, seed, rows)
    monkeypatch.setattr(rounded, "_SLICE", 2048)
    slices = kind.compress(x, seed, rows)
    assert all(torch.equal(*pair) for pair in zip(slices, whole, strict=True))
    assert torch.equal(kind.weight_gradient(g, slices, seed, rows), expected)


def test_slices_take_less_than_the_whole(monkeypatch):
    x, seed, made = torch.randn(512, 1024), draw_seed(CPU), []
    for least in (2**30, 2**14):
        monkeypatch.setattr(rounded, "_SLICE", least)
        peak = lowtide.measure(lambda: KINDS["int8"].compress(x, seed, 0), device="cpu").peak
        made.append(peak - x.numel() * x.element_size())
    assert made[1] < 0.3 * made[0]


def test_signs_are_fair_and_four_of_them_independent():
    found = torch.stack([signs(torch.arange(6), draw_seed(CPU), F64) for _ in range(4000)])
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    assert deviations(found, 0) < SIGMAS
    pairs = torch.combinations(torch.arange(6))
    assert deviations(found[:, pairs].prod(2), 0) < SIGMAS
    fours = torch.combinations(torch.arange(6), 4)
    assert deviations(found[:, fours].prod(2), 0) < SIGMAS


def test_uniform_and_normal_numbers():
    seeds = [draw_seed(CPU) for _ in range(2000)]
    index = torch.tensor([0, 1, 2**31 - 2])
    flat = torch.stack([uniforms(index, seed[0], F64) for seed in seeds])
    assert deviations(flat, 0.5) < SIGMAS
    assert deviations(flat.square(), 1 / 3) < SIGMAS
    bell = torch.stack([normals(index, seed, F64) for seed in seeds])
    assert deviations(bell, 0) < SIGMAS
    assert deviations(bell.square(), 1) < SIGMAS
    assert deviations(bell.pow(4), 3) < SIGMAS


def test_rows_are_chosen_evenly():
    counts = torch.zeros(2000, 9, dtype=F64)
    for count in counts:
        found = chosen(9, 4, draw_seed(CPU))
        assert found.unique().numel() == 4
        count[found] = 1
    assert deviations(counts, 4 / 9) < SIGMAS
    pairs = torch.combinations(torch.arange(9))
    assert deviations(counts[:, pairs].prod(2), 4 / 9 * 3 / 8) < SIGMAS


def test_kept_rows_and_bytes_of_a_choice():
    choice = Choice("strided", 0.2)
    assert [choice.rows(rows) for rows in (0, 1, 2, 10, 100, 101)] == [1, 1, 1, 2, 20, 20]
    assert choice.bytes(100, 64, torch.float32) == 20 * 64 * 4 + SEED_BYTES
    assert choice.bytes(2, 4, torch.float32) == 2 * 4 * 4  # a sketch and its seed would not be smaller
    assert Choice("strided", 1.0).is_exact(100, 64, torch.float32)
    assert Choice("int8", 1.0).bytes(100, 64, torch.float32) == 100 * (64 + 8)
    assert Choice("int4", 1.0).bytes(101, 64, torch.float32) == 51 * 64 + 101 * 8
    assert Choice("int8", 1.0).is_exact(100, 1, torch.bfloat16)


@pytest.mark.parametrize("rows", [35, 100])
def test_rows_are_dealt_to_any_number_of_buckets(rows):
    """Rows are added in blocks, and the last block may hold a turn and a part of one."""
    x, g = layer(rows)
    for k in range(1, rows):
        seed = draw_seed(CPU)
        turns = torch.zeros(rows, k, dtype=F64)
        turns[torch.arange(rows), torch.arange(rows) % k] = signs(torch.arange(rows), seed, F64)
        found = estimate(KINDS["strided"], x, g, k, seed=seed)
        assert torch.allclose(found, (turns.t() @ g).t() @ (turns.t() @ x), atol=1e-12), k
