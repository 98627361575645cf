"""Files that cannot be read."""

import pytest

from coordinator.config import ConfigError, load


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda path: None, "cannot be read: no such file or directory"),
        (lambda path: path.mkdir(), "cannot be read: is a directory"),
        (lambda path: path.write_bytes(b"a" * (16 * 2**20 + 1)), "is larger than 16777216 bytes"),
    ],
)
def test_unreadable_file(tmp_path, make, line):
    path = tmp_path / "c.yaml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {line}"


@pytest.mark.parametrize("data", [b"server:\n  host: \xff\n", "server:\n  host: a".encode("utf-16")])
def test_other_encodings(tmp_path, data):
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"c\.yaml:[12]: is not UTF-8 text$"):
        load(path)


def test_name_that_no_file_can_have(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: not a file name$"):
        load(tmp_path / "a\0b")
