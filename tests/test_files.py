"""Atomic writing: an earlier file is whole whatever happens."""

import json
import os
import stat

import pytest

from fashion_oct import files


def test_replacing_writes_the_whole_file(tmp_path):
    path = tmp_path / "a.txt"
    with files.replacing(path) as stream:
        stream.write("größer")
    assert path.read_bytes() == "größer".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_replacing_keeps_the_earlier_file_after_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("earlier")
    with pytest.raises(KeyboardInterrupt), files.replacing(path) as stream:
        stream.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_replacing_gives_the_permissions_of_an_ordinary_file(tmp_path):
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    with files.replacing(tmp_path / "replaced", "wb") as stream:
        stream.write(b"x")
    assert stat.S_IMODE((tmp_path / "replaced").stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_write_json_writes_readable_json(tmp_path):
    files.write_json(tmp_path / "a.json", {"name": "größer", "values": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"name": "größer", "values": [1, 2.5, None]}


def test_write_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []
