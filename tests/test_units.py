from __future__ import annotations

import pytest

from lowtide.errors import BudgetError, LowtideError
from lowtide.units import Budget, format_bytes, format_seconds, parse_budget


@pytest.mark.parametrize(
    ("asked", "size"),
    [
        (1, 1),
        (8589934592, 8589934592),
        ("1000", 1000),
        ("12B", 12),
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        ("  8GiB ", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5KiB", 1536),
        (".5MiB", 2**19),
        ("2.TB", 2 * 10**12),
        ("1PiB", 2**50),
        ("9007199254740993", 2**53 + 1),
        ("1.001KB", 1001),
        ("2.0" + "0" * 5000, 2),
    ],
)
def test_amounts(asked: int | str, size: int) -> None:
    budget = parse_budget(asked)
    assert budget.bytes == size
    assert budget.share is None
    assert budget.word is None


@pytest.mark.parametrize(("asked", "share"), [("60%", 0.6), ("12.5 %", 0.125), ("150%", 1.5)])
def test_shares(asked: str, share: float) -> None:
    budget = parse_budget(asked)
    assert budget.share == pytest.approx(share)
    assert budget.bytes is None


def test_a_share_is_what_is_written_of_the_whole() -> None:
    for tenths in range(1, 1500):
        assert parse_budget(f"{tenths / 10}%").part(1000) == tenths
    assert parse_budget("100%").part(10**16 + 1) == 10**16 + 1


@pytest.mark.parametrize("asked", ["free", "min", " Free "])
def test_words(asked: str) -> None:
    assert parse_budget(asked).word == asked.strip().lower()


def test_a_budget_stays_as_it_is() -> None:
    budget = Budget("8GiB", 8 * 2**30)
    assert parse_budget(budget) is budget
    assert str(parse_budget("8 GiB")) == "8 GiB"
    assert str(parse_budget(2048)) == "2.00 KiB"


@pytest.mark.parametrize(
    "asked",
    [
        *(0, -1, "0", "0GiB", "0%", "-1GiB", "-5%", "0.5B"),
        *("", " ", "GiB", "%", "lots", "8XB", "8 Gi B", "8,5GiB", "1e3", "1_000", "0x10", "8GiB!", "٣GiB"),
        *("nan", "inf", "NaN GiB", "infGiB", "9" * 400, "9" * 400 + "%", 10**400, -(10**400)),
        *(True, False, None, 1.5, float("nan"), float("inf"), b"8GiB", [8], object()),
    ],
)
def test_what_cannot_be_a_budget(asked: object) -> None:
    with pytest.raises(BudgetError, match='write an integer of bytes, "8GiB"') as caught:
        parse_budget(asked)  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, LowtideError)


def test_the_message_repeats_what_was_written() -> None:
    with pytest.raises(BudgetError, match="budget '8XB' has the unknown unit 'XB'"):
        parse_budget("8XB")
    with pytest.raises(BudgetError, match=r"budget 1\.5 is a float"):
        parse_budget(1.5)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="budget True is a bool"):
        parse_budget(True)


@pytest.mark.parametrize(("asked", "share"), [(0.5, "50%"), ("0.5", "50%"), (" .125 ", "12.5%")])
def test_a_fraction_is_told_how_a_share_is_written(asked: float | str, share: str) -> None:
    with pytest.raises(BudgetError, match=f'less than one byte; a share is written "{share}"'):
        parse_budget(asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-2048, "-2.00 KiB"),
        (2**20 * 1.5, "1.50 MiB"),
        (8589934592, "8.00 GiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_format_bytes(size: float, said: str) -> None:
    assert format_bytes(size) == said


@pytest.mark.parametrize("size", [1, 1023, 1024, 2**20, 2**30, 5 * 2**40])
def test_formatted_bytes_can_be_read_again(size: int) -> None:
    assert parse_budget(format_bytes(size)).bytes == size


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0 us"), (2.5e-7, "0.25 us"), (1e-6, "1 us"), (0.0125, "12.5 ms"), (1.0, "1 s"), (90.0, "90 s")],
)
def test_format_seconds(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said
