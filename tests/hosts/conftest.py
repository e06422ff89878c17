import pytest
from linked import links


@pytest.fixture(autouse=True)
def no_network():
    """This machine may be reached."""


@pytest.fixture
def linked():
    with links() as made:
        yield made
