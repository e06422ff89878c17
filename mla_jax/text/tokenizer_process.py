"""Encodes and decodes with an untrusted tokenizer: `guard.py` starts this file as a process of its own.

It reads a line of JSON, {path, tokenizer, controls, memory, output}, and writes {begins}. Then each line {encode} or {decode} is
answered by a line {ids}, {text}, or {cause}."""

import json
import sys
from collections.abc import Callable
from typing import Any


def main():
    start = json.loads(sys.stdin.buffer.readline())
    sys.path[:0] = start["path"]
    import tokenizers  # noqa: F401 before the limit of memory, which counts the addresses of libraries

    _limit(start["memory"])
    most, tasks = start["output"], {}
    _write(_answer(lambda: _open(start, tasks)), most)
    for line in sys.stdin.buffer if tasks else ():
        ((task, given),) = json.loads(line).items()
        _write(_answer(lambda task=task, given=given: tasks[task](given)), most)


def _open(start: dict, tasks: dict[str, Callable]) -> dict:
    import tokenizers

    model = tokenizers.Tokenizer.from_str(start["tokenizer"])
    read_as_text(model, start["controls"])
    begins = model.encode("", add_special_tokens=True).ids[:1]
    tasks["encode"] = lambda text: {"ids": model.encode(text, add_special_tokens=False).ids}
    tasks["decode"] = lambda ids: {"text": model.decode(ids, skip_special_tokens=False)}
    return {"begins": begins}


def read_as_text(model: Any, controls: list[str]):
    """From here on `model` sees the added tokens `controls` as text, and neither cuts nor pads."""
    added = model.get_added_tokens_decoder().values()
    model.add_special_tokens([token for token in added if token.content in set(controls)])
    model.encode_special_tokens = True
    model.no_truncation()
    model.no_padding()


def _answer(task: Callable[[], dict]) -> dict:
    try:
        return task()
    except BaseException as e:
        # The library raises bare Exception, and a BaseException where its own code panics
        return {"cause": str(e)[:1000]}


def _write(answer: dict, most: int):
    line = json.dumps(answer).encode()
    if len(line) > most:
        line = json.dumps({"cause": f"it makes more than {most:,} bytes"}).encode()
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _limit(memory: int):
    """Memory and files; Windows has no such limits, and macOS none of memory: there only the clock of `guard.py` decides."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (("AS", memory), ("FSIZE", 0), ("CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
        except (AttributeError, ValueError, OSError):
            continue


if __name__ == "__main__":
    main()
