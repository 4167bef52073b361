"""Which hosts and slots take part, and one clear error for a file or filter that is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.launcher import script, zeroshard
from zeroshard.errors import UsageError
from zeroshard.launch.cli import app
from zeroshard.launch.hosts import read_hostfile, select

_FILE = """
# a comment
a slots=4
b-1.example slots=2  # after a host

user@10.0.0.3\tslots=1
"""


def _hosts(directory: Path, text: str = _FILE) -> Path:
    (directory / "hosts").write_text(text)
    return directory / "hosts"


def _chosen(path: Path, **filters: object) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in select(read_hostfile(path), **filters)}  # pyright: ignore


def test_a_hostfile_is_read_in_order(tmp_path: Path) -> None:
    assert list(_chosen(_hosts(tmp_path)).items()) == [
        ("a", (0, 1, 2, 3)),
        ("b-1.example", (0, 1)),
        ("user@10.0.0.3", (0,)),
    ]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"include": "a:2,0@b-1.example"}, {"a": (0, 2), "b-1.example": (0, 1)}),
        ({"include": "b-1.example@a"}, {"a": (0, 1, 2, 3), "b-1.example": (0, 1)}),
        ({"exclude": "a:1,2@user@10.0.0.3"}, None),
        ({"exclude": "a:1,2@b-1.example"}, {"a": (0, 3), "user@10.0.0.3": (0,)}),
        ({"exclude": "a:0,1,2,3"}, {"b-1.example": (0, 1), "user@10.0.0.3": (0,)}),
        ({"num_nodes": 2}, {"a": (0, 1, 2, 3), "b-1.example": (0, 1)}),
        ({"num_nodes": 2, "num_slots": 1}, {"a": (0,), "b-1.example": (0,)}),
    ],
)
def test_filters_choose_hosts_and_slots(
    tmp_path: Path, filters: dict[str, object], left: dict[str, tuple[int, ...]] | None
) -> None:
    path = _hosts(tmp_path)
    if left is None:
        with pytest.raises(UsageError, match="'user' is no host"):
            _chosen(path, **filters)
    else:
        assert _chosen(path, **filters) == left


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\n\na slots=1", "line 3: a is there twice, first in line 1"),
        ("# x\na slot=2", "line 2: 'a slot=2' is not of the form 'host slots=N'"),
        ("a", "line 1: 'a' is not of the form 'host slots=N'"),
        ("a slots=two", "line 1: 'a slots=two' is not of the form"),
        ("a slots=0", "line 1: a has no slots; leave the line out"),
        ("# nobody", "it names no host"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_hostfile(_hosts(tmp_path, text))


@pytest.mark.parametrize(
    "line",
    ["a,b slots=2", "a[1-3] slots=2", "a;b slots=1", "$(a) slots=1", "a\0b slots=1", "-oA=b slots=1", "a slots=\u0663"],
)
def test_a_host_is_one_host_with_a_number_of_slots(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match=r"line 1: .* is not of the form 'host slots=N'"):
        read_hostfile(_hosts(tmp_path, line))


def test_slots_are_counted_before_there_is_a_place_for_each(tmp_path: Path) -> None:
    for many in ("5000", "9" * 30):
        with pytest.raises(UsageError, match=rf"line 1: a with {many} slots; at most 4096 can be"):
            read_hostfile(_hosts(tmp_path, f"a slots={many}"))


def test_a_byte_order_mark_is_no_part_of_a_name_and_addresses_are_names(tmp_path: Path) -> None:
    text = "\ufeffa slots=1\r\nuser@b slots=1\n::1 slots=1\n[fe80::1%eth0] slots=1\n"
    assert list(_chosen(_hosts(tmp_path, text))) == ["a", "user@b", "::1", "fe80::1%eth0"]


def test_an_address_in_brackets_is_the_address_as_ssh_takes_it(tmp_path: Path) -> None:
    path = _hosts(tmp_path, "[fe80::1] slots=4\nu@[fe80::2] slots=2\n")
    assert [host.name for host in read_hostfile(path)] == ["fe80::1", "u@fe80::2"]
    assert _chosen(path, include="[fe80::1]:0,2") == {"fe80::1": (0, 2)}
    with pytest.raises(UsageError, match="fe80::1 has no slot 4"):
        _chosen(path, include="[fe80::1]:4")


def test_a_hostfile_without_an_end_is_not_read_for_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it names no host"):
        read_hostfile(tmp_path / "pipe")
    with pytest.raises(UsageError, match="it has more than 16 MiB"):
        read_hostfile(Path("/dev/zero"))
    with pytest.raises(UsageError, match="line 4097: more than 4096 hosts"):
        read_hostfile(_hosts(tmp_path, "".join(f"h{number} slots=8\n" for number in range(5000))))


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "a:\u0660"}, "the slots of a are not of the form 0,1,2"),
        ({"include": "c"}, r"--include c: 'c' is no host; there are a, b-1.example"),
        ({"include": "a:4"}, r"--include a:4: a has no slot 4; it has slots 0 to 3"),
        ({"include": "a:0,0"}, "a slot of a is there twice"),
        ({"include": "a:x"}, "the slots of a are not of the form 0,1,2"),
        ({"include": "a:0@a:1"}, "a is there twice; write its slots as a:0,1"),
        ({"exclude": "a@b-1.example@c"}, "--exclude .*: 'c' is no host"),
        ({"include": "a", "exclude": "a"}, "--include and --exclude can't be combined"),
        ({"include": "a", "num_nodes": 1}, "--num-nodes and --num-gpus can't be combined with --include"),
        ({"num_nodes": 4}, "--num-nodes 4: the hostfile has 3"),
        ({"num_slots": 2}, r"--num-gpus 2: user@10.0.0.3 has 1 slots \(line 6\)"),
    ],
)
def test_a_wrong_filter_is_one_error(tmp_path: Path, filters: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _chosen(_hosts(tmp_path), **filters)


def test_a_filter_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--exclude a: no host is left"):
        _chosen(_hosts(tmp_path, "a slots=1"), exclude="a")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--hostfile", "none"], "--hostfile none: can't be read (No such file or directory)"),
        (["--hostfile", "hosts"], "hosts, line 2: 'b 2' is not of the form 'host slots=N'"),
        (["--include", "b"], "--include b: other hosts than localhost need a --hostfile"),
        (["--launcher", "openmpi"], "--launcher openmpi needs a --hostfile"),
        (
            ["--hostfile", "good", "--launcher", "slurm"],
            "--launcher slurm: Slurm knows its hosts; leave out",
        ),
        (["--hostfile", "good", "--nproc", "2"], "--nproc: with a hostfile its slots say how many ranks"),
        (["--hostfile", "good", "--node_rank", "1"], "--node-rank goes with --no-ssh"),
        (
            ["--hostfile", "good", "--max-restarts", "1"],
            "--max-restarts, --elastic and --nodes MIN:MAX with hosts that the launcher starts are not built",
        ),
        (["--hostfile", "good", "--rendezvous", "slurm"], "--rendezvous slurm is for nodes started one by one"),
        (["--nproc", "2", "--num_gpus", "2"], "--nproc and --num-gpus both say how many ranks; give one"),
        (["-m", "--no-python"], "--module and --no-python can't be combined"),
        (["--no_python"], "--no-python s.py: no such program, or it may not be executed"),
    ],
)
def test_options_that_do_not_fit_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    script(tmp_path, "", "s.py")
    _hosts(tmp_path, "a slots=1\nb 2\n")
    (tmp_path / "good").write_text("a slots=1\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["run", *words, "s.py"]).exception
    assert isinstance(error, UsageError)
    assert str(error).startswith(line)


def test_a_wrong_hostfile_is_one_line_of_the_command(tmp_path: Path) -> None:
    script(tmp_path, "", "s.py")
    _hosts(tmp_path, "a slots=1\nb 2\n")
    done = zeroshard(tmp_path, "run", "--hostfile", "hosts", "s.py")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["zeroshard: hosts, line 2: 'b 2' is not of the form 'host slots=N'"]
