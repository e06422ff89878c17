"""The corpus splits the same way everywhere; functions are extracted completely."""

import ast

import pytest

from demo import corpus

FILE = '''import os

class Shelf:
    @property
    def books(self):
        # from the left
        """All of them.

        In order."""
        return self._books

    def put(self, book,
            place=0):
        text = """a
    b"""
        self._books.insert(place, book)

def one_line(): return 1
'''


def test_functions_stand_at_the_margin_with_head_and_summary():
    books, put = corpus.functions(FILE)
    assert books.head == "@property\ndef books(self):"
    assert books.summary == "All of them."
    assert put.head == "def put(self, book,\n        place=0):"
    for function in (books, put):
        assert function.source.startswith(function.head + "\n")
        assert isinstance(ast.parse(function.source).body[0], ast.FunctionDef)


def test_files_that_do_not_parse_have_no_functions():
    assert list(corpus.functions("def f(:\n  pass\n")) == []


def test_the_split_depends_on_the_path_alone():
    paths = [f"package/module_{i}.py" for i in range(4000)]
    share = sum(map(corpus.is_held_out, paths)) / len(paths)
    assert 0.035 < share < 0.07
    assert [corpus.is_held_out(p) for p in ("chunk.py", "copyreg.py", "ast.py", "os.py")] == [True, True, False, False]


def test_generated_tables_and_what_is_no_utf8_are_left_out(tmp_path):
    for name in ("a.py", "encodings/cp037.py", "pydoc_data/topics.py", "site-packages/x.py", "test/b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    assert [f.path for f in corpus.sources(tmp_path)] == ["a.py", "test/b.py"]


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer([FILE] * 3, 300)


def test_the_tokenizer_gives_every_text_back_and_starts_with_the_control_tokens(tokenizer):
    text = FILE + "naïve ☃ 12345\t\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(corpus.SPECIALS)


def test_digits_go_by_threes_and_a_dot_stays_with_its_word(tokenizer):
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("x.append(12345)")]
    assert words == ["x", ".append", "(", "123", "45", ")"]
