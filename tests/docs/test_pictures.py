"""The pictures of the methods and of sketches are those that the script draws, and can be shown anywhere."""

import re
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

import pictures
from lowtide.solve import METHODS

ROOT = Path(__file__).parent.parent.parent
METHOD_PICTURES = sorted((ROOT / "docs" / "methods").glob("*.svg"))
PICTURES = [*METHOD_PICTURES, ROOT / "docs" / "sketch.svg"]
MOST_BYTES = 30_000


@pytest.mark.slow
@pytest.mark.whole_search
def test_pictures_are_up_to_date(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--check"])
    assert pictures.main() == 0, capsys.readouterr().out


def test_every_method_has_a_picture():
    names = {picture.stem for picture in METHOD_PICTURES}
    assert names == {"bound", *METHODS} - {"lower_sets_approximate"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_whole_in_itself_and_small(picture):
    text = picture.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    root = Xml.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label")
    assert "prefers-color-scheme:dark" in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "style", "g", "rect", "path", "text", "title"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_nothing_is_drawn_outside_of_a_picture(picture):
    root = Xml.fromstring(picture.read_text(encoding="utf-8"))
    _, _, width, height = map(float, root.get("viewBox").split())
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path.get("d")):
            assert 0 <= float(x) <= width, path.get("class")
            assert 0 <= float(y) <= height, path.get("class")


PAPERS = {
    "Kusumoto": "methods/lower_sets.svg",
    "Gruslys": "methods/sequence.svg",
    "Bershatsky": "sketch.svg",
    "Hong": "methods/chain.svg",
}


@pytest.mark.parametrize("author", PAPERS)
def test_each_of_the_four_papers_has_its_picture_where_it_is_explained(author):
    parts = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").split("\n\n")
    (place,) = [i for i, part in enumerate(parts) if f"]({PAPERS[author]})" in part]
    assert f"({author} et al." in parts[place - 1]
