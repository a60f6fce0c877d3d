from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(("asked", "meant"), [("8 Mb", "8MB"), ("1.5Gib", "1.5GiB"), ("3Kb", "3KB")])
def test_bits_are_no_bytes(asked: str, meant: str) -> None:
    with pytest.raises(BudgetError, match=f"reads as bits; for bytes write {meant}$"):
        parse_budget(asked)
    assert parse_budget(asked.lower()).bytes == parse_budget(meant).bytes  # nobody writes bits so


@pytest.mark.parametrize(("asked", "share"), [("60%", 0.6), ("12.5 %", 0.125), ("150%", 1.5)])
def test_shares(asked: str, share: float) -> None:
    budget = parse_budget(asked)
    assert budget.share == pytest.approx(share)
    assert budget.bytes is None


@pytest.mark.parametrize("asked", ["60%", "60 %", " 60% "])
def test_a_share_is_of_the_peak(asked: str) -> None:
    budget = parse_budget(asked)
    assert (budget.share, budget.of, budget.is_share_of_peak) == (0.6, "peak", True)
    assert not budget.is_share_of_device


@pytest.mark.parametrize(
    "asked",
    ["90% of device", "90 % of the device", " 90%of device ", "90%\tOf  The  DEVICE"],
)
def test_a_share_of_the_device(asked: str) -> None:
    budget = parse_budget(asked)
    assert (budget.share, budget.of, budget.is_share_of_device) == (0.9, "device", True)
    assert not budget.is_share_of_peak
    assert (budget.bytes, budget.word, str(budget)) == (None, None, asked)


spaces = st.text(" \t", max_size=3)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tenths=st.integers(1, 5000),
    of=st.sampled_from(["", "of device", "of the device", "OF DEVICE"]),
    gaps=st.tuples(spaces, spaces, spaces),
)
def test_shares_are_read_whatever_the_spaces(tenths: int, of: str, gaps: tuple[str, str, str]) -> None:
    before, between, behind = gaps
    budget = parse_budget(f"{before}{tenths / 10}{between}%{between}{of}{behind}")
    assert budget.part(1000) == tenths
    assert budget.of == ("device" if of else "peak")


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.text("0123456789.% ofthedvicGB", max_size=20))
def test_a_text_is_a_budget_or_refused_with_examples(text: str) -> None:
    try:
        budget = parse_budget(text)
    except BudgetError as error:
        said = str(error)
    else:
        assert [budget.bytes, budget.share, budget.word].count(None) == 2
        assert budget.of == "peak" or "device" in text
        return
    assert "90% of device" in said or "a share is written" in said


def test_a_share_is_what_is_written_of_the_whole() -> None:
    for tenths in range(1, 1500):
        assert parse_budget(f"{tenths / 10}%").part(1000) == tenths
    assert parse_budget("100%").part(10**16 + 1) == 10**16 + 1


@pytest.mark.parametrize("asked", ["free", "min", "knee", " Free "])
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
        *(
            "0% of device",
            "-5% of device",
            "8GiB of device",
            "of device",
            "90% of",
            "90% of gpu",
            "90% device",
        ),
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
