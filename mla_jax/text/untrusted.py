"""Works with an untrusted chat template or tokenizer: `chat.py` and `guard.py` start this file as a process of its own.

It reads a line of JSON, {path, limits, ...}. With {template, variables, conversations} it writes {texts} or {line, cause}. A
conversation is an object of the variables that differ, `messages` among them; where it fails and the first does not, its text is
null. With {tokenizer, controls} it writes {begins}; then
each line {encode} or {decode} is answered by a line {ids}, {text}, or {cause}."""

import json
import sys
from collections.abc import Callable
from typing import Any


def main():
    start = json.loads(sys.stdin.buffer.readline())
    sys.path[:0] = start["path"]
    if "tokenizer" in start:
        _work(start)
    else:
        answer = json.dumps(_rendered(start), ensure_ascii=False)
        sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass"))


def _limit(limits: dict):
    """Processor time, memory and files; Windows has none of these limits: there the caller ends the process by the clock."""
    try:
        import resource
    except ImportError:
        return
    names = {"seconds": "CPU", "memory": "AS"}
    kinds = {kind: limits[name] for name, kind in names.items() if name in limits}
    for kind, most in {**kinds, "FSIZE": 0, "CORE": 0}.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
        except (AttributeError, ValueError, OSError):  # macOS knows no limit of address space
            continue


def _rendered(request: dict) -> dict:
    import jinja2

    environment = _environment()
    _limit(request["limits"])
    try:
        template = environment.from_string(_alone(environment.parse(request["template"])))
        most, variables = request["limits"]["output"], request["variables"]
        contexts = [variables | _as_templates_read(conversation) for conversation in request["conversations"]]
        first = _render(template, contexts[0], most)
        return {"texts": [first, *(_render_or_none(template, context, most) for context in contexts[1:])]}
    except MemoryError:
        return {"line": None, "cause": f"it takes more than {request['limits']['memory'] >> 20} MB of memory"}
    except RecursionError:
        return {"line": None, "cause": "it calls itself without end"}
    except jinja2.TemplateSyntaxError as e:
        return {"line": e.lineno, "cause": e.message}
    except Exception as e:
        kind = "" if type(e) is jinja2.TemplateError else f"{type(e).__name__}: "
        return {"line": _line(e), "cause": kind + str(e)[:1000]}


class Arguments(dict):
    """Arguments of a tool call: an object for templates that look into it or write it as JSON, and its text where a template
    joins it to other texts."""

    def __init__(self, text: str, values: dict):
        super().__init__(values)
        self._text = text  # a name that the sandbox refuses

    def __str__(self):
        return self._text

    def __add__(self, other):
        return self._text + other

    def __radd__(self, other):
        return other + self._text


def _as_templates_read(conversation: dict) -> dict:
    """The conversation with Arguments in its tool calls."""
    for message in conversation["messages"]:
        for call in message.get("tool_calls", ()):
            given = call["function"]["arguments"]
            if isinstance(given, dict):
                call["function"]["arguments"] = Arguments(given["text"], given["object"])
    return conversation


def _environment():
    """The environment that transformers gives chat templates."""
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message="the template refuses the conversation"):
        raise jinja2.TemplateError(str(message))

    now = datetime.datetime.now()  # one for all conversations
    extensions = [jinja2.ext.loopcontrols, _generation_tag()]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: now.strftime(form),
        "namespace": _namespace(),
        "dict": lambda *args, **values: dict(*args, **values),
    }
    return environment


def _generation_tag():
    """{% generation %} marks what the model wrote, for training; here it changes nothing."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 the library's own form

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _namespace():
    """jinja2's namespace without Python's own names, which lead out of the sandbox."""
    import jinja2

    def check(name):
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {str(name)!r}")

    class Namespace(jinja2.utils.Namespace):
        def __init__(*args, **values):  # `self` may be a name
            for name in dict(*args[1:], **values):
                check(name)
            jinja2.utils.Namespace.__init__(*args, **values)

        def __setitem__(self, name, value):
            check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    return Namespace


def _alone(tree):
    """`tree` if it asks for no other template."""
    import jinja2
    from jinja2 import nodes

    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise jinja2.TemplateSyntaxError(
            f"{type(node).__name__.lower()} is refused: a template is one file", node.lineno
        )
    return tree


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _render(template, context: dict, most: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(context):
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > most:
            raise ValueError(f"it writes more than {most:,} bytes")
        pieces.append(piece)
    return "".join(pieces)


def _render_or_none(template, context: dict, most: int) -> str | None:
    try:
        return _render(template, context, most)
    except Exception:
        return None


def _line(error: BaseException) -> int | None:
    """The innermost line of the template in the traceback, which jinja2 rewrites for this."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = step.tb_lineno
        step = step.tb_next
    return line


def read_as_text(model: Any, controls: list[str]):
    """From here on `model` sees the added tokens `controls` as text, and neither cuts nor pads."""
    added = model.get_added_tokens_decoder().values()
    model.add_special_tokens([token for token in added if token.content in set(controls)])
    model.encode_special_tokens = True
    model.no_truncation()
    model.no_padding()


def _work(start: dict):
    import tokenizers

    _limit(start["limits"])  # only now: the limit of memory counts the addresses of libraries
    most, tasks = start["limits"]["output"], {}

    def opened() -> dict:
        model = tokenizers.Tokenizer.from_str(start["tokenizer"])
        read_as_text(model, start["controls"])
        tasks["encode"] = lambda text: {"ids": model.encode(text, add_special_tokens=False).ids}
        tasks["decode"] = lambda ids: {"text": model.decode(ids, skip_special_tokens=False)}
        return {"begins": model.encode("", add_special_tokens=True).ids[:1]}

    _write(_answer(opened), most)
    for line in sys.stdin.buffer if tasks else ():
        ((task, given),) = json.loads(line).items()
        _write(_answer(lambda task=task, given=given: tasks[task](given)), most)


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


if __name__ == "__main__":
    main()
