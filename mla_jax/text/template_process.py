"""Renders an untrusted chat template: `chat.py` starts this file as a process of its own, for one answer.

It reads {path, template, variables, conversations, limits} as JSON from stdin, and writes {texts} or {line, cause}."""

import json
import sys


def main():
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:0] = request["path"]
    answer = _answer(request)
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _answer(request: dict) -> dict:
    import jinja2

    environment = _environment()
    _limit(request["limits"])
    try:
        template = environment.from_string(_alone(environment.parse(request["template"])))
        most = request["limits"]["output"]
        return {
            "texts": [
                _render(template, {**request["variables"], "messages": m}, most)
                for m in request["conversations"]
            ]
        }
    except MemoryError:
        return {"line": None, "cause": f"it takes more than {request['limits']['memory'] >> 20} MB of memory"}
    except RecursionError:
        return {"line": None, "cause": "it calls itself without end"}
    except jinja2.TemplateSyntaxError as e:
        return {"line": e.lineno, "cause": e.message}
    except Exception as e:
        kind = "" if type(e) is jinja2.TemplateError else f"{type(e).__name__}: "
        return {"line": _line(e), "cause": kind + str(e)[:1000]}


def _limit(limits: dict):
    """Processor time, memory and files; Windows has none of these limits, there `chat.py` ends the process by the clock."""
    try:
        import resource
    except ImportError:
        return
    for kind, most in (("CPU", limits["seconds"]), ("AS", limits["memory"]), ("FSIZE", 0), ("CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
        except (AttributeError, ValueError, OSError):  # macOS knows no limit of address space
            continue


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
    for piece in template.generate(**context):
        size += len(piece.encode("utf-8", "surrogatepass"))
        if size > most:
            raise ValueError(f"it writes more than {most:,} bytes")
        pieces.append(piece)
    return "".join(pieces)


def _line(error: BaseException) -> int | None:
    """The innermost line of the template in the traceback, which jinja2 rewrites for this."""
    line, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = step.tb_lineno
        step = step.tb_next
    return line


if __name__ == "__main__":
    main()
