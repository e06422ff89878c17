"""The public names of `import mla_jax`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mla_jax
from mla_jax.base import errors

ROOT = Path(__file__).parent.parent


def test_the_public_names_are_listed_and_each_can_be_had():
    assert set(mla_jax.__all__) == set(mla_jax._HOME)
    assert set(dir(mla_jax)) == {*mla_jax.__all__, "__version__"}
    for name in mla_jax.__all__:
        assert getattr(mla_jax, name).__name__ == name


def test_every_error_is_public():
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert kinds <= set(mla_jax.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        mla_jax.LMM  # noqa: B018


def test_errors_and_options_need_no_jax():
    code = "import sys; from mla_jax import BadFile, Config, Options, SamplingParams"
    code += "; print(sorted({'jax', 'flax'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout == "[]\n"


def test_types_are_declared_for_type_checkers():
    assert (Path(mla_jax.__file__).parent / "py.typed").exists()


def test_no_name_is_advised_for_installation_that_others_may_have_on_the_package_index():
    named = re.compile(r"pip install[^\n`]*mla[-_]jax")
    kinds = ("*.py", "*.md", "*.ipynb", "*.toml")
    texts = {path: path.read_text() for kind in kinds for path in ROOT.rglob(kind) if not _is_hidden(path)}
    assert [str(path) for path, text in texts.items() if named.search(text) and path != Path(__file__)] == []


def _is_hidden(path: Path) -> bool:
    """Whether it is in a folder such as .git or .venv."""
    return any(part.startswith(".") for part in path.relative_to(ROOT).parts)
