#!/usr/bin/env python3
"""Makes what the SDKs have in common with the server, from `openapi/v1.json` and `docs/API.md`.

    sdk/generate.py           write the files
    sdk/generate.py --check   fail if one of them is not what would be written

Python 3.10 or later, nothing else. The output depends on nothing but its sources. It makes:

- the data types: `types.py` (what the server answers), `inputs.py` (what it is sent), `types.ts` (both),
- the table of operations: method, path and type of the answer (`_operations.py`, `operations.ts`),
- a class of errors for each code of the table in docs/API.md (`_codes.py`, `codes.ts`),
- the synchronous Python client, from the asynchronous one.
"""

import json
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "sdk/python/src/sandkeep"
TYPESCRIPT = ROOT / "sdk/typescript/src"
MADE = "Made by sdk/generate.py. Do not edit."

API = json.loads((ROOT / "openapi/v1.json").read_text())
SCHEMAS = API["components"]["schemas"]


def camel(text):
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[_\-]", text))


def operations():
    """Every operation: id, method, path, the operation itself."""
    for path, item in API["paths"].items():
        for method in ("get", "put", "post", "patch", "delete"):
            if method in item:
                yield item[method]["operationId"], method.upper(), path, item[method]


def name_of(schema):
    return schema["$ref"].rsplit("/", 1)[1] if "$ref" in schema else None


def reachable(roots):
    """Names of all schemas that some schemas are made of."""
    found, todo = set(), list(roots)
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo.extend(node)
        elif isinstance(node, dict):
            name = name_of(node) if isinstance(node.get("$ref"), str) else None
            if name and name in SCHEMAS and name not in found:
                found.add(name)
                todo.append(SCHEMAS[name])
                if name.startswith("Paged_"):
                    todo.append({"$ref": "#/components/schemas/" + name.removeprefix("Paged_")})
            todo.extend(value for key, value in node.items() if key != "example")
    return found


REQUESTS = reachable([op.get("requestBody", {}) for _, _, _, op in operations()]) - {"Raw"}
ANSWERS = reachable([op["responses"] for _, _, _, op in operations()] + [{"$ref": "#/components/schemas/ErrorAnswer"}]) - {"Raw"}


def nullable(schema):
    """The schema without null, and whether it had it."""
    kind = schema.get("type")
    if isinstance(kind, list) and "null" in kind:
        rest = [one for one in kind if one != "null"]
        return {**schema, "type": rest[0] if len(rest) == 1 else rest}, True
    for word in ("oneOf", "anyOf"):
        some = schema.get(word, [])
        rest = [one for one in some if one.get("type") != "null"]
        if len(rest) != len(some):
            return (rest[0] if len(rest) == 1 else {**schema, word: rest}), True
    return schema, False


def words(schema):
    """The words of an enumeration, also one whose words are described one by one."""
    if "enum" in schema:
        return schema["enum"]
    if "const" in schema:
        return [schema["const"]]
    some = schema.get("oneOf", [])
    lists = [words(one) for one in some]
    if some and all(lists):
        return [word for one in lists for word in one]
    return None


def summary(schema, indent=""):
    text = (schema.get("description") or "").split("\n\n")[0].replace("\n", " ").strip()
    # Links of Rust's documentation mean nothing here.
    return re.sub(r"\[`?([^\]`]+)`?\](\([^)]*\))?", r"`\1`", text).replace("\\", "\\\\")


# Python ----------------------------------------------------------------------------------------


REQUIRED = ""
ABSENT = "absent"


class Python:
    """Writes schemas as Python types; `inputs` are dictionaries, what is answered are data classes."""

    def __init__(self, inputs):
        self.inputs = inputs
        self.lines = []
        self.last = []

    def type(self, schema):
        schema, null = nullable(schema)
        text = self.bare(schema)
        return f"{text} | None" if null else text

    def bare(self, schema):
        if name := name_of(schema):
            return page(name) if name.startswith("Paged_") else name
        if found := words(schema):
            return "Literal[" + ", ".join(json.dumps(word) for word in found) + "]"
        if "oneOf" in schema or "anyOf" in schema:
            return " | ".join(self.type(one) for one in schema.get("oneOf") or schema["anyOf"])
        kind = schema.get("type")
        if kind == "array":
            item = self.type(schema["items"])
            return f"Sequence[{item}]" if self.inputs else f"list[{item}]"
        if kind == "object":
            more = schema.get("additionalProperties")
            value = self.type(more) if isinstance(more, dict) else "Any"
            return f"Mapping[str, {value}]" if self.inputs else f"dict[str, {value}]"
        return {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}.get(kind, "Any")

    def define(self, name, schema):
        if "properties" in schema:
            self.record(name, schema)
            return
        some = schema.get("oneOf") or schema.get("anyOf")
        if some and not words(schema):
            kinds = [self.variant(name, one) for one in some]
            self.alias(name, " | ".join(kinds), schema)
            return
        self.alias(name, self.type(schema), schema)

    def alias(self, name, text, schema):
        parts = text.split(" | ")
        whole = f"Union[{', '.join(parts)}]" if len(parts) > 1 else text
        # Classes that it names come before it.
        names = set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", whole))) - {"Union", "Literal", "str", "int", "None"}
        lines = self.last if names else self.lines
        lines.append(f"{name}: TypeAlias = {whole}")
        lines.append(f'"""{summary(schema)}"""\n')

    def variant(self, name, schema):
        """A type of its own for one of several that a schema may be."""
        if "properties" not in schema:
            return self.type(schema)
        tags = [words(one)[0] for one in schema["properties"].values() if words(one) and len(words(one)) == 1]
        own = name + camel(tags[0] if tags else next(iter(schema["properties"])))
        self.record(own, schema)
        return own

    def record(self, name, schema):
        fields = schema["properties"]
        needed = set(schema.get("required", []))
        about = summary(schema) or f"See `{name}` in docs/API.md."
        if self.inputs:
            self.dictionary(name, fields, needed, about)
        else:
            self.data_class(name, fields, needed, about)

    def dictionary(self, name, fields, needed, about):
        def wrapped(field):
            text = self.type(fields[field])
            return f"Required[{text}]" if field in needed else text

        if any(keyword.iskeyword(field) for field in fields):
            self.lines.append(f"{name} = TypedDict(\n    {json.dumps(name)},\n    {{")
            self.lines += [f"        {json.dumps(field)}: {wrapped(field)!r}," for field in fields]
            self.lines.append(f'    }},\n    total=False,\n)\n"""{about}"""\n')
            return
        self.lines.append(f'\nclass {name}(TypedDict, total=False):\n    """{about}"""\n')
        for field, one in fields.items():
            self.lines.append(f"    {field}: {wrapped(field)}")
            if text := summary(one):
                self.lines.append(f'    """{text}"""')
        self.lines.append("")

    def data_class(self, name, fields, needed, about):
        self.lines.append(f'\n@dataclass(frozen=True, kw_only=True)\nclass {name}:\n    """{about}"""\n')
        for field, one in fields.items():
            own = field + "_" if keyword.iskeyword(field) else field
            default = self.default(one, field in needed)
            # An enumeration or a record that may be absent: the field tells that it was.
            kind = self.type(one) + (" | None" if default == ABSENT else "")
            self.lines.append(f"    {own}: {kind}{' = None' if default == ABSENT else default}")
            if text := summary(one):
                self.lines.append(f'    """{text}"""')
        self.lines.append("")

    def default(self, schema, needed):
        schema, null = nullable(schema)
        if null:
            return " = None"
        found = words(schema)
        if found and len(found) == 1:
            return f" = {json.dumps(found[0])}"
        if needed:
            return REQUIRED
        kind = schema.get("type")
        if kind == "array":
            return " = field(default_factory=list)"
        if kind == "object" and "properties" not in schema:
            return " = field(default_factory=dict)"
        zero = {"string": '""', "integer": "0", "number": "0.0", "boolean": "False"}.get(kind)
        if zero is not None and not found:
            return f" = {zero}"
        return ABSENT


def page(name):
    return f"Page[{name.removeprefix('Paged_')}]"


def python_types():
    writer = Python(inputs=False)
    for name in SCHEMAS:
        if name in ANSWERS and not name.startswith("Paged_"):
            writer.define(name, SCHEMAS[name])
    head = f'''"""What the server answers. {MADE}"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, Union

from typing_extensions import TypeAlias

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list."""

    items: list[T]
    """What is on it."""
    next: str | None = None
    """The `cursor` of the next page; absent on the last."""

'''
    return head + "\n".join(writer.lines + ["", *writer.last]) + "\n"


def python_inputs():
    writer = Python(inputs=True)
    for name in SCHEMAS:
        if name in REQUESTS:
            writer.define(name, SCHEMAS[name])
    head = f'''"""What the server is sent, as dictionaries. {MADE}"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from typing_extensions import Required, TypeAlias, TypedDict

'''
    return head + "\n".join(writer.lines + ["", *writer.last]) + "\n"


def answer_of(operation):
    """How an operation answers: the name of a type, `Page[…]`, `[]` of a type, a kind of stream, or nothing."""
    for status, answer in operation["responses"].items():
        if not status.startswith(("1", "2")):
            continue
        if status == "101":
            return "socket"
        content = answer.get("content", {})
        if not content:
            continue
        plain = content.get("application/json", {}).get("schema", {})
        if "application/x-ndjson" in content and not (name_of(plain) or "").startswith("Paged_"):
            return "lines"
        if "text/event-stream" in content and "application/json" not in content:
            return "events"
        schema = content.get("application/json", {}).get("schema")
        if schema is None:
            return "bytes"
        name = name_of(schema)
        if name is None:
            return f"list[{name_of(schema['items'])}]"
        return page(name) if name.startswith("Paged_") else name
    return "nothing"


def table():
    rows = []
    for name, method, path, operation in operations():
        keyed = any(one.get("name") == "Idempotency-Key" for one in operation.get("parameters", []))
        rows.append((name, method, path, keyed, answer_of(operation)))
    return sorted(rows)


def python_operations():
    rows = "".join(
        f'    "{name}": Operation("{method}", "{path}", {keyed}, "{answer}"),\n'
        for name, method, path, keyed, answer in table()
    )
    return f'''"""Every operation of the API. {MADE}"""

from __future__ import annotations

from typing import NamedTuple


class Operation(NamedTuple):
    """How an operation is called."""

    method: str
    path: str
    keyed: bool
    """Whether it takes an idempotency key."""
    answer: str
    """What it answers: a type, or `lines`, `events`, `bytes`, `socket`, `nothing`."""


OPERATIONS: dict[str, Operation] = {{
{rows}}}
'''


# TypeScript ------------------------------------------------------------------------------------


def ts_type(schema, indent=""):
    schema, null = nullable(schema)
    text = ts_bare(schema, indent)
    return f"{text} | null" if null else text


def ts_bare(schema, indent):
    if name := name_of(schema):
        return f"Page<{name.removeprefix('Paged_')}>" if name.startswith("Paged_") else name
    if found := words(schema):
        return " | ".join(json.dumps(word) for word in found)
    if "oneOf" in schema or "anyOf" in schema:
        return " | ".join(ts_type(one, indent) for one in schema.get("oneOf") or schema["anyOf"])
    kind = schema.get("type")
    if "properties" in schema:
        return "{\n" + ts_fields(schema, indent + "  ") + indent + "}"
    if kind == "array":
        item = ts_type(schema["items"], indent)
        return f"({item})[]" if " " in item else f"{item}[]"
    if kind == "object":
        more = schema.get("additionalProperties")
        return f"Record<string, {ts_type(more, indent) if isinstance(more, dict) else 'unknown'}>"
    return {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}.get(kind, "unknown")


def ts_fields(schema, indent):
    needed = set(schema.get("required", []))
    out = ""
    for field, one in schema["properties"].items():
        if text := summary(one):
            out += f"{indent}/** {text.replace('*/', '* /')} */\n"
        out += f"{indent}{field}{'' if field in needed else '?'}: {ts_type(one, indent)};\n"
    return out


def ts_types():
    out = f"/** What the server is sent and answers. {MADE} */\n\n"
    out += "/** A page of a list. */\nexport interface Page<T> {\n  /** What is on it. */\n  items: T[];\n"
    out += "  /** The `cursor` of the next page; absent on the last. */\n  next?: string | null;\n}\n"
    for name, schema in SCHEMAS.items():
        if name.startswith("Paged_") or name == "Raw" or name not in REQUESTS | ANSWERS:
            continue
        if text := summary(schema):
            out += f"\n/** {text.replace('*/', '* /')} */"
        if "properties" in schema:
            out += f"\nexport interface {name} {{\n{ts_fields(schema, '  ')}}}\n"
        else:
            out += f"\nexport type {name} = {ts_type(schema)};\n"
    return out


def ts_operations():
    rows = "".join(
        f'  {name}: ["{method}", "{path}", {str(keyed).lower()}],\n' for name, method, path, keyed, _ in table()
    )
    answers = "".join(f"  {name}: {ts_answer(answer)};\n" for name, _, _, _, answer in table())
    return f'''/** Every operation of the API: method, path, whether it takes an idempotency key. {MADE} */

import type * as types from "./types.js";

export const OPERATIONS = {{
{rows}}} as const;

/** The name of an operation. */
export type Operation = keyof typeof OPERATIONS;

/** What operations answer as JSON. */
export interface Answers {{
{answers}}}
'''


def ts_answer(answer):
    if answer in ("lines", "events", "bytes", "socket", "nothing"):
        return "undefined"
    if found := re.fullmatch(r"(Page|list)\[(\w+)\]", answer):
        return f"types.Page<types.{found[2]}>" if found[1] == "Page" else f"types.{found[2]}[]"
    return f"types.{answer}"


# Errors ----------------------------------------------------------------------------------------

# What an error of a status is. The first status of a code in the table decides.
BASES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "AccessError", 404: "NotFoundError",
    405: "BadRequestError", 408: "UnavailableError", 409: "ConflictError", 410: "GoneError",
    412: "PreconditionError", 413: "LimitError", 415: "BadRequestError", 421: "BadRequestError",
    422: "LimitError", 426: "BadRequestError", 429: "TooManyError", 500: "ServerError",
    503: "UnavailableError", 507: "ResourceError",
}
NAMES = {"timeout": "ServerTimeoutError"}


def error_codes():
    """Codes of the table in docs/API.md, with their statuses."""
    codes = {}
    part = (ROOT / "docs/API.md").read_text().split("\n## Errors\n")[1]
    for line in part.splitlines():
        if row := re.match(r"\| (\d{3}(?:, \d{3})*) \| ((?:`\w+`(?:, )?)+) \|", line):
            statuses = [int(one) for one in row[1].split(", ")]
            for code in re.findall(r"`(\w+)`", row[2]):
                codes.setdefault(code, []).extend(statuses)
    return dict(sorted(codes.items()))


def former_codes():
    part = (ROOT / "docs/API.md").read_text().split("\n## Errors\n")[1]
    return dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", part, re.M))


def class_of(code):
    return NAMES.get(code, camel(code) + "Error")


def base_of(statuses):
    return BASES[statuses[0]]


def bases():
    return sorted(set(BASES.values()))


ABOUT = {
    "BadRequestError": "The request is wrong as it is.",
    "AuthenticationError": "The key is missing, unknown or expired.",
    "AccessError": "The key may not do this.",
    "NotFoundError": "There is nothing of that name or id.",
    "ConflictError": "It cannot be done in the present state.",
    "GoneError": "What it is about no longer exists.",
    "PreconditionError": "The state is not what the call expects.",
    "LimitError": "It is larger than a limit.",
    "TooManyError": "Too much at a time: later it works.",
    "ServerError": "The server failed.",
    "UnavailableError": "It does not work at this moment.",
    "ResourceError": "The host or the sandbox has run out of something.",
}


def python_codes():
    out = f'''"""Errors of the server, by code. {MADE}"""

from __future__ import annotations

from ._errors import ApiError

__all__ = [
'''
    out += "".join(f'    "{name}",\n' for name in [*bases(), *map(class_of, error_codes())])
    out += "]\n"
    for name in bases():
        out += f'\n\nclass {name}(ApiError):\n    """{ABOUT[name]}"""\n'
    for code, statuses in error_codes().items():
        out += f'\n\nclass {class_of(code)}({base_of(statuses)}):\n    """`{code}`, {", ".join(map(str, statuses))}."""\n'
    out += "\n\nBY_CODE: dict[str, type[ApiError]] = {\n"
    out += "".join(f'    "{code}": {class_of(code)},\n' for code in error_codes())
    out += "}\n\nBY_STATUS: dict[int, type[ApiError]] = {\n"
    out += "".join(f"    {status}: {name},\n" for status, name in BASES.items())
    out += "}\n\nFORMER: dict[str, str] = {\n"
    out += "".join(f'    "{former}": "{code}",\n' for former, code in former_codes().items())
    return out + "}\n"


def ts_codes():
    out = f'/** Errors of the server, by code. {MADE} */\n\nimport {{ ApiError }} from "./api-error.js";\n'
    for name in bases():
        out += f"\n/** {ABOUT[name]} */\nexport class {name} extends ApiError {{}}\n"
    for code, statuses in error_codes().items():
        out += f"\n/** `{code}`, {', '.join(map(str, statuses))}. */\nexport class {class_of(code)} extends {base_of(statuses)} {{}}\n"
    out += "\nexport const BY_CODE: Record<string, typeof ApiError> = {\n"
    out += "".join(f"  {code}: {class_of(code)},\n" for code in error_codes())
    out += "};\n\nexport const BY_STATUS: Record<number, typeof ApiError> = {\n"
    out += "".join(f"  {status}: {name},\n" for status, name in BASES.items())
    out += "};\n\nexport const FORMER: Record<string, string> = {\n"
    out += "".join(f'  {former}: "{code}",\n' for former, code in former_codes().items())
    return out + "};\n"


# The synchronous client ------------------------------------------------------------------------

SYNC = [
    (r"\basync def\b", "def"), (r"\basync with\b", "with"), (r"\basync for\b", "for"),
    (r"\bawait ", ""), (r"__aenter__", "__enter__"), (r"__aexit__", "__exit__"),
    (r"__aiter__", "__iter__"), (r"__anext__", "__next__"), (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsyncIterator\b", "Iterator"), (r"\bAsyncIterable\b", "Iterable"), (r"\bAsyncGenerator\b", "Generator"),
    (r"\bAsyncByteStream\b", "SyncByteStream"), (r"\bhandle_async_request\b", "handle_request"),
    (r"\baclose\b", "close"), (r"\baread\b", "read"), (r"\baiter_bytes\b", "iter_bytes"),
    (r"\baiter_raw\b", "iter_raw"), (r"\bAsyncHTTPTransport\b", "HTTPTransport"),
    (r"\basyncio\.sleep\b", "time.sleep"), (r"\bimport asyncio\b", "import time"),
    (r"\bAwaitable\[(\w+(?:\[[^\]]*\])?)\]", r"\1"), (r"\bAsync([A-Z]\w*)", r"\1"), (r"\banext\(", "next("), (r"\baiter\(", "iter("),
    (r"\basynchronous\b", "synchronous"),
]


def made_sync():
    out = {}
    for path in sorted((PYTHON / "_async").glob("*.py")):
        text = path.read_text()
        for pattern, into in SYNC:
            text = re.sub(pattern, into, text)
        doc, rest = text.split('"""\n', 1)
        out[PYTHON / "_sync" / path.name] = f"# {MADE} Its source is _async/{path.name}.\n{doc}\"\"\"\n{rest}"
    return out


def files():
    return {
        PYTHON / "types.py": python_types(),
        PYTHON / "inputs.py": python_inputs(),
        PYTHON / "_operations.py": python_operations(),
        PYTHON / "_codes.py": python_codes(),
        TYPESCRIPT / "types.ts": ts_types(),
        TYPESCRIPT / "operations.ts": ts_operations(),
        TYPESCRIPT / "codes.ts": ts_codes(),
        **made_sync(),
    }


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    ids = [name for name, _, _, _, _ in table()]
    lower = [camel(name).lower() for name in ids]
    if len(set(lower)) != len(ids):
        sys.exit("two operations have the same name in another spelling")
    stale = []
    for path, text in files().items():
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(str(path.relative_to(ROOT)))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        sys.exit("not what sdk/generate.py makes: " + ", ".join(stale))


if __name__ == "__main__":
    main()
