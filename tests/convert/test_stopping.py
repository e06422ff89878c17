"""A conversion that is stopped, starved or lied to: said clearly, nothing half written under OUT, and the next run goes on."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap

import models
import pytest
from checkpoints import assert_same_model, convert, raw, released

from convert import export, tensors, write
from mla_jax.weights.orbax_store import Writer

pytestmark = pytest.mark.deep

STOPPED = "stopped: run the same command again to resume"


@pytest.fixture
def source(tmp_path):
    return released(tmp_path / "hf", "v3", "fp8")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(tensors, "STEP", 20_000)
    monkeypatch.setattr(export, "FILE_BYTES", 30_000)


def at_step(monkeypatch, number: int, act):
    """Does something while step `number` is written; of an export, file `number`."""
    save, complete, steps = Writer.save, export.complete, []

    def acting(function):
        def acted(*arguments):
            steps.append(function)
            if len(steps) == number:
                act()
            return function(*arguments)

        return acted

    monkeypatch.setattr(Writer, "save", acting(save))
    monkeypatch.setattr(export, "complete", acting(complete))


def interrupt(times: int):
    return lambda: [signal.raise_signal(signal.SIGINT) for _ in range(times)]


def assert_begun(out):
    assert not out.exists()
    assert out.with_name("out.partial").is_dir()
    assert not out.with_name("out.lock").exists()


def assert_whole(source, out, to="orbax"):
    if to == "hf":
        assert raw(out) == raw(source)
    assert_same_model(source, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_after_the_step_or_at_once_and_the_next_run_goes_on(tmp_path, source, monkeypatch, capfd, times, to):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_step(patch, 4, interrupt(times))
        assert convert(source, out, "--to", to) == 130
    said = capfd.readouterr().err
    assert said.endswith(STOPPED + "\n")
    assert "stopping after this step; Ctrl-C again stops now" in said
    assert_begun(out)
    before = {path: path.stat().st_mtime_ns for path in out.with_name("out.partial").rglob("*.safetensors")}
    assert convert(source, out, "--to", to) == 0
    assert_whole(source, out, to)
    if to == "orbax":
        assert "\nresuming at layer " in capfd.readouterr().err
        assert len([*(out / "weights").iterdir()]) > 8
    else:
        assert len(before) in (4 - times, 3)  # the journal is the first; the second signal may come one later
        kept = {path.name: stamp for path, stamp in before.items()}
        assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept


def test_ctrl_c_at_the_last_step_lets_it_end(tmp_path, source, monkeypatch):
    monkeypatch.setattr(tensors, "STEP", 1 << 30)
    with monkeypatch.context() as patch:
        at_step(patch, 5, interrupt(1))  # of an embedding's step, and of one a layer
        assert convert(source, tmp_path / "out") == 0
    assert_whole(source, tmp_path / "out")


def test_ctrl_c_means_again_what_it_meant_before(tmp_path, source):
    before = signal.getsignal(signal.SIGINT)
    assert convert(source, tmp_path / "out") == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_to_go_on_as_another_conversion_is_refused_and_the_difference_named(tmp_path, source, monkeypatch, capfd, to):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_step(patch, 3, interrupt(1))
        assert convert(source, out, "--to", to) == 130
    other = released(tmp_path / "other", "v3", "fp8")
    changes = {("--dtype", "bf16"): "dtype"} | ({("--mesh", "tensor=2"): "mesh"} if to == "orbax" else {})
    for options, what in changes.items():
        capfd.readouterr()
        assert convert(source, out, "--to", to, *options) == 3
        assert f"was begun from something else\n  what differs: {what}\n" in capfd.readouterr().err
    assert convert(other, out, "--to", to) == 3
    assert "\n  what differs: source\n" in capfd.readouterr().err
    status = (source / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(1, 1))
    assert convert(source, out, "--to", to) == 3
    assert "\n  what differs: source\n" in capfd.readouterr().err
    os.utime(source / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert convert(source, out, "--to", to) == 0
    assert_same_model(source, out)


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("change", ["touched", "cut", "deleted", "replaced"])
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, source, monkeypatch, capfd, change, to):
    file = source / "model.safetensors"
    acts = {
        "touched": lambda: os.utime(file, ns=(1, 1)),
        "cut": lambda: os.truncate(file, 60_000),
        "deleted": file.unlink,
        "replaced": lambda: [file.rename(tmp_path / "old"), file.write_bytes((tmp_path / "old").read_bytes())],
    }
    expected = raw(source)
    at_step(monkeypatch, 2, acts[change])
    code = convert(source, tmp_path / "out", "--to", to)
    if to == "hf" and change in ("deleted", "replaced"):  # the file that was opened is read to its end, whatever its name is
        assert code == 0
        assert raw(tmp_path / "out") == expected
        return
    assert code == 3
    said = capfd.readouterr().err
    assert "while it was read" in said or "model.safetensors cannot be read" in said
    assert not (tmp_path / "out").exists()


# folders that are not ours


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_partial_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path, source, capfd, to):
    partial = tmp_path / "out.partial"
    (partial / "weights" / "mine").mkdir(parents=True)
    for file in ("notes.txt", "weights/mine/thesis.tex", "model.safetensors"):
        (partial / file).write_text("years of work")
    assert convert(source, tmp_path / "out", "--to", to) == 3
    said = capfd.readouterr().err
    record = "manifest.json" if to == "orbax" else "conversion.json"
    assert f"error: {partial} was not made by a conversion\n  it has no {record}, found model.safetensors, notes.txt, " in said
    assert "\n  move it away, or choose another OUT\n" in said
    assert sorted(p.read_text() for p in partial.rglob("*") if p.is_file()) == ["years of work"] * 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("what", ["a file", "a link to nothing", "a link to a folder"])
def test_what_is_no_folder_under_the_name_of_the_partial_one_is_refused(tmp_path, source, capfd, to, what):
    partial, elsewhere = tmp_path / "out.partial", tmp_path / "elsewhere"
    if what == "a file":
        partial.write_text("mine")
    else:
        partial.symlink_to(elsewhere)
    if what == "a link to a folder":
        elsewhere.mkdir()
        (elsewhere / "mine").write_text("mine")
    assert convert(source, tmp_path / "out", "--to", to) == 3
    assert f"error: {partial} was not made by a conversion" in capfd.readouterr().err
    if what == "a link to a folder":
        assert [path.name for path in elsewhere.iterdir()] == ["mine"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("left", [(), ("temporary",)])
def test_what_a_kill_left_before_the_first_step_is_gone_on_with(tmp_path, source, to, left):
    """An empty folder, or the record under the name that it has until all of it is on the disk."""
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for _ in left:
        (partial / ("manifest.json.new" if to == "orbax" else "conversion.json.partial")).write_text('{"kin')
    assert convert(source, tmp_path / "out", "--to", to) == 0
    assert_whole(source, tmp_path / "out", to)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".new", ".partial")]


# what the system refuses


def test_reads_of_a_few_bytes_at_a_time_are_continued(tmp_path, monkeypatch):
    source = released(tmp_path / "hf", "youtu")
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:999]], offset))
    assert convert(source, tmp_path / "out") == 0
    monkeypatch.undo()
    assert_same_model(source, tmp_path / "out")


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_an_error_of_the_disk_is_said_and_the_next_run_goes_on(tmp_path, source, monkeypatch, capfd, to):
    read, calls = os.preadv, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) > 100:
            raise OSError(errno.EIO, "Input/output error")
        return read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        assert convert(source, tmp_path / "out", "--to", to) == 3
    assert "model.safetensors cannot be read\n  Input/output error at byte " in capfd.readouterr().err
    assert_begun(tmp_path / "out")
    assert convert(source, tmp_path / "out", "--to", to) == 0
    assert_whole(source, tmp_path / "out", to)


LIMITED = """
    import resource, sys
    from convert import export, tensors
    from convert.__main__ import main
    tensors.STEP, export.FILE_BYTES = 20_000, 30_000
    limit = int(sys.argv.pop())
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(main())
"""


def child(code: str, *arguments, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_full_disk_is_said_and_the_next_run_goes_on(tmp_path, monkeypatch, to):
    hf = {**models.FAMILIES["v3"], "moe_intermediate_size": 200}
    source = models.write(tmp_path / "hf", hf, models.tensors(hf, mtp=True))
    process = child(LIMITED, source, tmp_path / "out", "--to", to, 200_000)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 4, said
    assert "cannot be written\n  the disk is full, or a quota is reached\n  the " in said
    assert "are kept: remove the cause and run the same command again" in said
    assert "Traceback" not in said
    assert_begun(tmp_path / "out")
    assert convert(source, tmp_path / "out", "--to", to) == 0
    assert_whole(source, tmp_path / "out", to)


@pytest.mark.parametrize("to", ["orbax", "hf"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_disk_that_is_full_at_the_last_files_is_said_too(tmp_path, source, monkeypatch, capfd, to, name):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        module = export if to == "hf" else write

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device", name)

        patch.setattr(module, "write_others", full)
        assert convert(source, out, "--to", to) == 4
    assert "the disk is full, or a quota is reached" in capfd.readouterr().err
    assert_begun(out)
    assert convert(source, out, "--to", to) == 0
    assert_whole(source, out, to)


# two at once

HOLD = """
    import sys
    from pathlib import Path
    from convert.write import lock
    with lock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_second_converter_is_refused_and_told_of_the_first_until_that_is_killed(tmp_path, source, capfd, to):
    out = tmp_path / "out"
    with child(HOLD, out, stdin=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert convert(source, out, "--to", to) == 3
        said = capfd.readouterr().err
        assert f"error: another converter writes {out}\n  process {holder.pid} on {os.uname().nodename}\n  wait for it" in said
        assert not out.with_name("out.partial").exists()
        holder.kill()
    assert out.with_name("out.lock").exists()
    assert convert(source, out, "--to", to) == 0
    assert_whole(source, out, to)


def test_a_signal_from_outside_stops_it_too(tmp_path):
    """By a terminal's Ctrl-C, the whole process."""
    code = """
        import sys
        from convert import tensors
        from convert.__main__ import main
        from mla_jax.weights.orbax_store import Writer
        tensors.STEP, save, steps = 20_000, Writer.save, []
        def waiting(*arguments):
            steps.append(arguments)
            if len(steps) == 3:
                print("third step", flush=True)
                sys.stdin.read()  # until the signal is sent
            return save(*arguments)
        Writer.save = waiting
        sys.exit(main())
    """
    source = released(tmp_path / "hf", "v3", "fp8")
    with child(code, source, tmp_path / "out", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "third step\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.endswith(STOPPED + "\n")
    assert_begun(tmp_path / "out")
    assert convert(source, tmp_path / "out") == 0
    assert_whole(source, tmp_path / "out")


INSIDE = """
    import os, signal, sys, threading
    from contextlib import contextmanager
    from convert import tensors
    from convert.__main__ import main
    from mla_jax.weights import orbax_store
    weights, opened, calls = orbax_store.Path(sys.argv[2] + ".partial", "weights"), orbax_store._orbax, []

    def interrupt_twice(before, handler):
        while {*weights.iterdir()} == before:  # until Orbax writes the step
            pass
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is handler:  # until the first is noticed
            pass
        os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            given = {*weights.iterdir()}, signal.getsignal(signal.SIGINT)
            threading.Thread(target=interrupt_twice, args=given, daemon=True).start()
        try:
            with opened(*arguments) as ocp:
                yield ocp
        except KeyboardInterrupt:
            print("inside", flush=True)
            raise

    orbax_store._orbax = interrupted
    tensors.STEP = 1  # a step a tensor
    sys.exit(main())
"""


def test_a_second_ctrl_c_within_a_step_of_orbax_stops_now_and_the_next_run_goes_on(tmp_path):
    hf = {**models.FAMILIES["v3"], "vocab_size": 200_000}  # the first steps, embedding and head, take long
    source = models.write(tmp_path / "hf", hf, models.tensors(hf))
    with child(INSIDE, source, tmp_path / "out") as process:
        printed, said = process.communicate(timeout=600)
    assert (process.returncode, printed) == (130, "inside\n"), said
    assert said.endswith(STOPPED + "\n")
    assert "Traceback" not in said
    assert_begun(tmp_path / "out")
    manifest = json.loads((tmp_path / "out.partial" / "manifest.json").read_text())
    assert {entry["step"] for entry in manifest["tensors"].values()} == {0}
    assert convert(source, tmp_path / "out") == 0
    assert_whole(source, tmp_path / "out")


def test_ctrl_c_while_all_is_checked_says_that_all_is_there(tmp_path, source, monkeypatch, capfd):
    def interrupted(*_):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("convert.verify.verify", interrupted)
        assert convert(source, out) == 130
    assert capfd.readouterr().err.endswith(f"\nstopped: {out} is complete, and mla-convert {out} --verify checks it again\n")
    assert convert(out, "--verify") == 0
