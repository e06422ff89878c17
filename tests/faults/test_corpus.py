"""Every bad folder is refused: the right error, in words that help, at once, with little memory, before the weights are read."""

from collections import Counter

import pytest
from faults.corpus import CORPORA
from faults.cost import LONG, cost_of

ALL = [(name, fault) for name, corpus in CORPORA.items() for fault in corpus.faults]


def test_names_of_faults_are_unique():
    assert [name for name, times in Counter(f"{corpus} {fault.name}" for corpus, fault in ALL).items() if times > 1] == []


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the float64 weight that overflows
@pytest.mark.parametrize(("corpus", "fault"), ALL, ids=lambda value: getattr(value, "name", value))
def test_a_bad_folder_is_refused(corpus, fault, folder, reads):
    path, caught = folder(corpus, fault.base), []
    fault.mutate(path)
    reads.clear()  # of the folder while it was valid

    def refused():
        with pytest.raises(fault.error) as error:
            CORPORA[corpus].read(path)
        caught.append(error.value)

    for _ in range(3):  # other work of the process may have taken memory; a fault that is costly is so every time
        caught.clear()
        reads.clear()
        cost = cost_of(refused)
        if cost.memory < CORPORA[corpus].memory:
            break
    text = str(*caught)
    assert type(caught[0]) is fault.error
    assert [word for word in fault.words if word not in text] == []
    assert all(line.isprintable() and len(line) < 1000 for line in text.split("\n"))
    assert len(text.split("\n")) < 35
    assert bool(reads) == fault.reads
    assert cost.seconds < LONG
    assert cost.memory < CORPORA[corpus].memory
