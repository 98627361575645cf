"""Watched files: what changes, what is broken, what is missing."""

import os
import time

import pytest

from coordinator.config import ConfigError, parse, read_instances
from coordinator.discovery.files import FileSource

from discovery_world import validate  # isort: skip

P0 = "- {role: prefill, url: http://10.0.0.1:8000, id: p0}\n"
D0 = "- {role: decode, url: http://10.0.0.2:8000, id: d0}\n"


class Looker:
    """A source whose looks the test makes itself."""

    def __init__(self, pattern, settings):
        self.reads = []
        self.source = FileSource(str(pattern), self.read)
        self.settings = settings

    def read(self, name):
        self.reads.append(name)
        return read_instances(name, self.settings, validate)

    def look(self, times=1):
        """Look; whether any of the looks had something to tell."""
        looks = [self.source.look() for _ in range(times)]
        return any(looks)

    @property
    def ids(self):
        return sorted(one.id for found in self.source._good.values() for one in found)

    @property
    def trouble(self):
        return self.source._told()


@pytest.fixture
def looker(tmp_path, settings):
    return lambda pattern: Looker(tmp_path / pattern, settings)


def write(path, text):
    """Write a file that is surely another one than before, however coarse the clock of the file system is."""
    path.write_text(text)
    stamp = time.time_ns() + write.count * 1_000_000
    write.count += 1
    os.utime(path, ns=(stamp, stamp))


write.count = 1


def test_the_first_look_reads_at_once_and_always_tells(looker, tmp_path):
    write(tmp_path / "a.yaml", P0 + D0)
    files = looker("a.yaml")
    assert files.look()
    assert (files.ids, files.trouble) == (["d0", "p0"], "")
    assert not files.look(3)
    assert len(files.reads) == 2  # once more when it has kept still, and not again


def test_a_change_counts_once_the_file_has_kept_still(looker, tmp_path):
    write(tmp_path / "a.yaml", P0 + D0)
    files = looker("a.yaml")
    files.look(3)
    write(tmp_path / "a.yaml", P0)  # half of what is being written
    assert not files.look()
    write(tmp_path / "a.yaml", P0 + D0 + D0.replace("d0", "d1").replace("2:", "3:"))
    assert not files.look()
    assert files.ids == ["d0", "p0"]
    assert files.look()
    assert files.ids == ["d0", "d1", "p0"]


def test_a_file_replaced_by_another_of_the_same_size_and_time_is_seen(looker, tmp_path):
    path, other = tmp_path / "a.yaml", tmp_path / "b.new"
    path.write_text(P0)
    other.write_text(P0.replace("p0", "p1"))
    for one in (path, other):
        os.utime(one, ns=(10**18, 10**18))
    files = looker("a.yaml")
    files.look(3)
    other.replace(path)
    files.look(2)
    assert files.ids == ["p1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- role: prefill\n  urk: http://10.0.0.1:1\n", ":2: instances[0].urk: unknown key; did you mean 'url'?"),
        ("", "the file is empty"),
        ("- {role: prefill", ":1: is not YAML"),
        ("instances:\n", "must be a list"),
        ("other: []\n", "other: unknown key"),
        ("just text\n", ":1: must hold keys"),
        (P0 + P0, ":2: instances[1].url: the same prefill instance is listed twice, in line 1 and in line 2"),
        (
            P0 + "- {role: decode, url: http://10.0.0.2:1, bad: 1}\n",
            ":2: instances[1].bad: bad: this engine has no such",
        ),
        ("- &a {role: prefill, url: http://10.0.0.1:1}\n- *a\n", ":2: instances[1]: aliases (*name) are not read"),
    ],
)
def test_a_broken_file_keeps_the_last_good_instances_and_says_why(looker, tmp_path, text, words):
    path = tmp_path / "a.yaml"
    write(path, P0)
    files = looker("a.yaml")
    files.look(3)
    write(path, text)
    assert files.look(2)
    assert files.ids == ["p0"]
    assert str(path) in files.trouble
    assert words in files.trouble
    assert not files.look(3)  # told once
    write(path, D0)
    assert files.look(2)
    assert (files.ids, files.trouble) == (["d0"], "")


def test_json_and_a_mapping_with_a_list_are_read_too(looker, tmp_path, settings):
    write(tmp_path / "a.json", '{"instances": [{"role": "prefill", "url": "http://10.0.0.1:8000", "id": "p0"}]}')
    files = looker("a.json")
    files.look()
    assert files.ids == ["p0"]
    (found,) = next(iter(files.source._good.values()))
    assert (found.engine, found.model) == ("vllm", "m")  # from what all instances have in common
    write(tmp_path / "a.json", "[]")
    files.look(2)
    assert files.ids == []


def test_a_path_that_is_missing_keeps_its_instances(looker, tmp_path):
    path = tmp_path / "a.yaml"
    write(path, P0)
    files = looker("a.yaml")
    files.look(3)
    path.unlink()
    assert files.look()
    assert (files.ids, files.trouble) == (["p0"], f"{path} cannot be read: no such file or directory")
    write(path, P0)
    assert files.look(2)
    assert (files.ids, files.trouble) == (["p0"], "")


def test_a_path_that_was_never_there_gives_nothing_and_says_so(looker):
    files = looker("none.yaml")
    assert files.look()
    assert files.ids == []
    assert "none.yaml cannot be read" in files.trouble


def test_what_is_no_file_is_not_read(looker, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    files = looker("pipe.yaml")
    assert files.look()
    assert files.reads == []
    assert "pipe.yaml cannot be read: not a file" in files.trouble


def test_files_of_a_pattern_come_and_go(looker, tmp_path):
    write(tmp_path / "a.yaml", P0)
    files = looker("*.yaml")
    files.look(3)
    write(tmp_path / "b.yaml", D0)
    write(tmp_path / "c.txt", "no: matter")
    files.look(2)
    assert (files.ids, files.trouble) == (["d0", "p0"], "")
    (tmp_path / "a.yaml").unlink()
    assert not files.look()  # some programs remove a file just before they write it
    assert files.ids == ["d0", "p0"]
    assert files.look()
    assert (files.ids, files.trouble) == (["d0"], "")


def test_a_file_of_a_pattern_that_is_back_at_once_was_not_gone(looker, tmp_path):
    write(tmp_path / "a.yaml", P0)
    files = looker("*.yaml")
    files.look(3)
    (tmp_path / "a.yaml").unlink()
    assert not files.look()
    write(tmp_path / "a.yaml", P0)
    assert not files.look(3)
    assert files.ids == ["p0"]


def test_one_broken_file_of_a_pattern_does_not_hold_up_the_others(looker, tmp_path):
    write(tmp_path / "a.yaml", P0)
    write(tmp_path / "b.yaml", "- nonsense\n")
    files = looker("*.yaml")
    assert files.look()
    assert files.ids == ["p0"]
    assert f"{tmp_path / 'b.yaml'}:1: instances[0]" in files.trouble
    (tmp_path / "b.yaml").unlink()
    assert files.look(2)
    assert files.trouble == ""


def test_a_folder_that_is_gone_keeps_everything(looker, tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "a.yaml", P0)
    files = looker("d/*.yaml")
    files.look(3)
    folder.rename(tmp_path / "e")
    assert files.look()
    assert not files.look(3)
    assert (files.ids, files.trouble) == (["p0"], f"{folder} cannot be read: no such file or directory")
    (tmp_path / "e").rename(folder)
    assert files.look()
    assert (files.ids, files.trouble) == (["p0"], "")


def test_a_mounted_configmap_is_seen_as_a_whole(looker, tmp_path):
    """The kubelet exchanges a symbolic link; names that begin with a dot are no files of a pattern."""
    for name, text in (("one", P0), ("two", D0)):
        (tmp_path / f"..{name}").mkdir()
        write(tmp_path / f"..{name}" / "a.yaml", text)
    (tmp_path / "..data").symlink_to("..one")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    files = looker("*.yaml")
    files.look(3)
    assert files.ids == ["p0"]
    (tmp_path / "..data_tmp").symlink_to("..two")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    files.look(2)
    assert files.ids == ["d0"]


def test_relative_paths_in_a_file_begin_at_its_folder(tmp_path, settings):
    (tmp_path / "ca.pem").write_text("x")
    write(tmp_path / "a.yaml", "- {role: prefill, url: https://10.0.0.1:1, ca_file: ca.pem}\n")
    (found,) = read_instances(str(tmp_path / "a.yaml"), settings, validate)
    assert found.options["ca_file"] == str(tmp_path / "ca.pem")


def test_a_file_cannot_name_code(tmp_path, settings):
    write(tmp_path / "a.yaml", "- {role: prefill, url: http://10.0.0.1:1, engine: os:system}\n")
    with pytest.raises(
        ConfigError, match=r"a.yaml:1: instances\[0\].engine: only the configuration file may name code"
    ):
        read_instances(str(tmp_path / "a.yaml"), settings, lambda *_: pytest.fail("it was looked at"))
    named = parse("cluster: {engine: vllm}\nengines: {'os:system': {}}\n")
    assert read_instances(str(tmp_path / "a.yaml"), named, validate)[0].engine == "os:system"


def test_many_reasons_are_cut(looker, tmp_path):
    for number in range(6):
        write(tmp_path / f"{number}.yaml", "x: 1\n")
    files = looker("*.yaml")
    files.look()
    assert files.trouble.endswith("; and 3 more")


def test_paths_of_the_configuration_begin_at_its_folder(tmp_path):
    settings = parse("discovery:\n  files: [a.yaml, /b/*.json]\n", str(tmp_path / "cluster.yaml"))
    assert settings.discovery.files == (str(tmp_path / "a.yaml"), "/b/*.json")


async def test_what_was_never_read_is_told_as_incomplete(tmp_path, settings, running):
    write(tmp_path / "a.yaml", P0)
    write(tmp_path / "b.yaml", "- 1\n")
    source = FileSource(str(tmp_path / "*.yaml"), lambda name: read_instances(name, settings, validate), look_s=0.02)
    notebook = running(source)
    await notebook.until(lambda n: n.ids == ["p0"] and n.incomplete and n.trouble)
    write(tmp_path / "b.yaml", D0)
    await notebook.until(lambda n: n.ids == ["d0", "p0"] and not n.incomplete and not n.trouble)
    write(tmp_path / "b.yaml", "- 1\n")
    await notebook.until(lambda n: n.ids == ["d0", "p0"] and not n.incomplete and n.trouble)


async def test_a_change_is_told_within_a_second(tmp_path, settings, running):
    path = tmp_path / "a.yaml"
    write(path, P0)
    notebook = running(FileSource(str(path), lambda name: read_instances(name, settings, validate), look_s=0.02))
    await notebook.until(lambda n: n.ids == ["p0"])
    write(path, P0 + D0)
    await notebook.until(lambda n: n.ids == ["d0", "p0"])
    write(path, "- 1\n")
    await notebook.until(lambda n: n.trouble)
    assert notebook.ids == ["d0", "p0"]
    told = notebook.told
    write(path, P0)
    await notebook.until(lambda n: n.ids == ["p0"] and not n.trouble)
    assert notebook.told == told + 1
