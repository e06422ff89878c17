"""A library's file that was cut short or changed is refused before the system maps it, which would end the process by SIGBUS."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpu_experts import Unsupported, intact, library
from cpu_experts.build import install

ROOT = str(Path(__file__).parents[2])
OPEN_ALL = """
import sys
from pathlib import Path
from cpu_experts import Unsupported, library
for path in map(Path, sys.argv[1:]):
    open_ = library.opened if path.name.startswith("plain") else lambda p: library.opened_ffi(p, library.ffi_headers())
    try:
        print(path.name, "loaded", open_(path).__class__.__name__)
    except Unsupported as error:
        print(path.name, str(error))
"""


@pytest.fixture
def built_files(builds, ffi_library):
    return {"plain": (builds() / library.NAME).read_bytes(), "ffi": ffi_library.read_bytes()}


def open_all(*paths: Path) -> list[str]:
    """The results of opening each in a process of its own, which a signal would end."""
    command = [sys.executable, "-c", OPEN_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ROOT})
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.deep
def test_a_library_cut_short_anywhere_is_refused_and_says_how_to_build_it(built_files, tmp_path):
    paths = []
    for name, contents in built_files.items():
        for size in (0, 3, 40, 100, 5000, len(contents) // 2, len(contents) * 9 // 10, len(contents) - 1):
            paths.append(tmp_path / f"{name}-{size}.so")
            paths[-1].write_bytes(contents[:size])
    said = open_all(*paths)
    assert len(said) == 16
    for line in said:
        assert line.endswith(f": {library.REBUILD}"), line
    assert any("is damaged (it has 5,000 bytes, but its headers describe " in line for line in said)


@pytest.mark.deep
def test_an_installed_library_loads_and_one_changed_byte_of_it_is_found(builds, ffi_library, tmp_path, capsys):
    for name, built in (("plain.so", builds() / library.NAME), ("ffi.so", ffi_library)):
        installed = tmp_path / name
        install(built, installed)
        contents = bytearray(installed.read_bytes())
        assert contents.startswith(built.read_bytes())
        contents[len(contents) // 2] ^= 1
        (tmp_path / f"plain-changed-{name}").write_bytes(contents)
    said = open_all(*sorted(tmp_path.iterdir()))
    assert [line for line in said if " loaded " in line] == ["ffi.so loaded CDLL", "plain.so loaded CDLL"]
    changed = [line for line in said if " loaded " not in line]
    assert len(changed) == 2
    for line in changed:
        assert f"is damaged (its checksum is not the one that the build wrote): {library.REBUILD}" in line


def test_an_installed_library_that_lost_only_its_checksum_is_whole(builds, tmp_path, capsys):
    install(builds() / library.NAME, tmp_path / "plain.so")
    contents = (tmp_path / "plain.so").read_bytes()
    (tmp_path / "plain.so").write_bytes(contents[:-1])
    assert open_all(tmp_path / "plain.so") == ["plain.so loaded CDLL"]


def test_a_segment_beyond_the_end_is_found_where_there_are_no_section_headers(builds, tmp_path):
    contents = bytearray((builds() / library.NAME).read_bytes())
    contents[0x28:0x30] = bytes(8)  # e_shoff, as `sstrip` leaves it
    contents[0x3C:0x40] = bytes(4)  # e_shnum, e_shstrndx
    (tmp_path / "whole.so").write_bytes(contents)
    assert intact.damage(tmp_path / "whole.so") is None
    (tmp_path / "cut.so").write_bytes(contents[: len(contents) // 2])
    with pytest.raises(Unsupported, match=r"is damaged .*headers describe"):
        library.opened(tmp_path / "cut.so")


@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1))
def test_no_header_makes_the_check_itself_fail(tmp_path_factory, noise, offset, count):
    header = bytearray(b"\x7fELF\x02\x01" + noise.ljust(58, b"\0"))
    header[0x20:0x28], header[0x38:0x3A] = struct.pack("<Q", offset), struct.pack("<H", count)
    path = tmp_path_factory.getbasetemp() / "noise.so"
    path.write_bytes(header)
    assert isinstance(intact.damage(path), str | None)
