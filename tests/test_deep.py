"""`make deep` runs a file's deep tests when anything has changed that they depend on, and only then."""

import json

import deep
import pytest

VERSIONS = "python 3.11 jax 0.10.2"
FILES = {
    "mla_jax/__init__.py": 'HOME = {"LLM": "mla_jax.llm", "Other": "mla_jax.other"}\ndef __getattr__(name): ...\n',
    "mla_jax/llm.py": "def later():\n    from mla_jax.base import (\n        sizes,\n        rules as r,\n    )\n",
    "mla_jax/base/__init__.py": "",
    "mla_jax/base/sizes.py": 'start("template_process.py")\n',
    "mla_jax/base/rules.py": "import mla_jax.base.names as n, json\n",
    "mla_jax/base/names.py": 'take(f"kernels.{name}")\n',
    "mla_jax/base/template_process.py": "",
    "mla_jax/base/rates.npz": "1",
    "mla_jax/demo/config.json": "{}",
    "mla_jax/other.py": "",
    "kernels/__init__.py": "",
    "kernels/attention/gpu.py": "",
    "convert/__main__.py": "",
    "tools/training.py": "",
    "csrc/linear.cpp": "",
    "tests/conftest.py": "import settled\n",
    "tests/settled.py": "",
    "tests/helper.py": "",
    "tests/engine/conftest.py": "",
    "tests/engine/test_one.py": "\n".join(
        [
            "from mla_jax import LLM",
            "import helper, training",
            'run("-m", "convert")',
            '@pytest.mark.deep("csrc")',
            "def test_it(): ...",
        ]
    ),
    "tests/engine/test_other.py": "def test_that(): ...\n",
    "README.md": "",
    "tests/deep.json": "{}",
    "tests/suite.txt": "1 1",
}
TEST = "tests/engine/test_one.py"
UNRELATED = {"mla_jax/other.py", "tests/engine/test_other.py", "README.md", "tests/deep.json", "tests/suite.txt"}


@pytest.fixture
def root(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def digest(root, versions=VERSIONS):
    return deep.Sources(root, versions).digest(root / TEST)


@pytest.mark.parametrize("name", FILES)
def test_a_change_to_any_file_that_a_test_needs_changes_its_digest_and_others_do_not(root, name):
    before = digest(root)
    (root / name).write_text(FILES[name] + "\n")
    assert (digest(root) == before) == (name in UNRELATED)


def test_other_versions_are_another_digest(root):
    assert digest(root) != digest(root, "python 3.11 jax 0.10.3")


def test_the_versions_are_those_of_python_jax_flax_and_numpy():
    assert deep.versions().split()[::2] == ["python", "jax", "jaxlib", "flax", "numpy"]


def test_a_new_deep_test_waits_and_one_that_passed_with_these_files_does_not(root):
    (root / "tests/test_new.py").write_text("@pytest.mark.deep\ndef test_it(): ...\n")
    assert deep.passed(deep.Sources(root, VERSIONS), {TEST: digest(root), "tests/test_gone.py": "0"}) == {TEST}


@pytest.fixture
def record(root, monkeypatch):
    """Of a folder in which two files have deep tests; one of them fails."""
    (root / "tests/conftest.py").write_text("")
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  deep\n  parity\n")
    (root / TEST).write_text("import pytest\n@pytest.mark.deep\ndef test_it(): ...\ndef test_plain(): assert False\n")
    failing = "import pytest\n@pytest.mark.deep\ndef test_it(): assert False, 'here'\n@pytest.mark.deep\ndef test_that(): ...\n"
    (root / "tests/test_failing.py").write_text(failing)
    (root / "tests/test_parity.py").write_text("import pytest\n@pytest.mark.deep\n@pytest.mark.parity\ndef test_it(): ...\n")
    (root / "tests/deep.json").write_text(json.dumps({"3.0": {TEST: "0"}, deep.PYTHON: {"tests/test_gone.py": "0", TEST: "1"}}))
    monkeypatch.setattr(deep, "ROOT", root)
    monkeypatch.setattr(deep, "RECORD", root / "tests/deep.json")
    return root / "tests/deep.json"


def test_what_passes_is_recorded_and_what_fails_is_printed_and_waits(record, capsys):
    assert not deep.run_waiting("not parity", 2)
    assert "AssertionError: here" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["3.0"] == {TEST: "0"}, "of another Python"
    assert found[deep.PYTHON].keys() == {TEST}
    assert deep.waiting() == ["tests/test_failing.py", "tests/test_parity.py"]
    assert deep.run_waiting("parity", 1)
    assert deep.waiting() == ["tests/test_failing.py"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("test", "needed"),
    [
        ("engine/test_llm.py", "mla_jax/text/guard.py"),
        ("engine/test_llm.py", "mla_jax/model/transformer.py"),
        ("engine/test_llm.py", "pallas_kernels/mla_decode/xla.py"),
        ("ui/test_batch_file.py", "mla_jax/generate.py"),
        ("cpu_experts/test_ffi.py", "cpu_experts/csrc/CMakeLists.txt"),
        ("cpu_experts/test_sanitizers.py", "tests/cpu_experts/test_forward.py"),
        ("pallas_kernels/test_gpu.py", "tests/pallas_kernels/late.py"),
        ("notebooks/test_notebooks.py", "notebooks/07_long_context.ipynb"),
    ],
)
def test_what_this_suite_depends_on_is_found(test, needed):
    sources = deep.Sources(deep.ROOT, VERSIONS)
    assert deep.ROOT / needed in sources.files(deep.ROOT / "tests" / test)


def test_tests_of_kernels_depend_on_no_file_of_the_models():
    sources = deep.Sources(deep.ROOT, VERSIONS)
    for test in ("cpu_experts/test_sanitizers.py", "pallas_kernels/test_gpu.py"):
        assert not [file for file in sources.files(deep.ROOT / "tests" / test) if "mla_jax" in file.parts]
