# SPDX-License-Identifier: Apache-2.0
"""The small changes that tests must notice: one at a time, found in the syntax tree of a source and
made in its text, so that all else stays as it is written."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_OTHERS = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
# Texts, types and what is stated of them are no behaviour that a test should hold.
_SILENT = (ast.Raise, ast.Assert, ast.JoinedStr)


@dataclass(frozen=True)
class Edit:
    """Puts `new` in the place of text[start:end]."""

    function: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def shown(self, text: str) -> str:
        """The change as the lines that it is in: what names it when lines above it move."""
        first = text.rfind("\n", 0, self.start) + 1
        last = (text.find("\n", self.end) + len(text) + 1) % (len(text) + 1)
        made = text[first : self.start] + self.new + text[self.end : last]
        return f"{' '.join(text[first:last].split())} => {' '.join(made.split())}"


class _Finder:
    def __init__(self, text: str) -> None:
        self.text, self.found = text, list[Edit]()
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def place(self, line: int, column: int) -> int:
        begin = self.lines[line - 1]
        # columns of the tree count bytes
        return begin + len(self.text[begin:].encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.place(node.lineno, node.col_offset),
            self.place(node.end_lineno, node.end_col_offset),
        )

    def put(self, function: str, node: ast.AST, new: str) -> None:
        start, end = self.span(node)
        self.found.append(Edit(function, node.lineno, start, end, new))

    def between(self, function: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """An operator has no place of its own in the tree."""
        first, last = self.span(left)[1], self.span(right)[0]
        at = self.text.find(old, first, last)
        if at >= 0:
            self.found.append(Edit(function, right.lineno, at, at + len(old), new))

    def without(self, function: str, nodes: list[ast.AST], i: int) -> None:
        """Leaves one of several that commas part out."""
        if i + 1 < len(nodes):
            start, end = self.span(nodes[i])[0], self.span(nodes[i + 1])[0]
        else:
            start, end = self.span(nodes[i - 1])[1], self.span(nodes[i])[1]
        self.found.append(Edit(function, nodes[i].lineno, start, end, ""))

    # --- what each kind of node can become ----------------------------------------------------

    def walk(self, node: ast.AST, function: str) -> None:
        if isinstance(node, _SILENT) or _states(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                self.decorator(decorator, f"{function}{node.name}")
            inside = f"{function}{node.name}."
            defaults = [] if isinstance(node, ast.ClassDef) else _defaults(node)
            for child in [*defaults, *node.body]:
                self.walk(child, inside)
            return
        self.change(node, function.rstrip("."))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.walk(child, function)

    def decorator(self, node: ast.AST, function: str) -> None:
        """@op(one, other): what an operator is registered for."""
        if isinstance(node, ast.Call) and len(node.args) > 1:
            for i in range(len(node.args)):
                self.without(function, node.args, i)

    def change(self, node: ast.AST, function: str) -> None:
        match node:
            case ast.Compare(ops=[op]) if type(op) in _OTHERS:
                old = {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
                text = old.get(type(op)) or _symbol(op)
                self.between(function, node.left, node.comparators[0], text, _OTHERS[type(op)])
            case ast.BinOp(op=op) if type(op) in _OTHERS and not _is_text(node):
                self.between(function, node.left, node.right, _symbol(op), _OTHERS[type(op)])
            case ast.BoolOp(values=values):
                word = "and" if isinstance(node.op, ast.And) else "or"
                for i in range(len(values)):
                    kept = [self.segment(v) for j, v in enumerate(values) if j != i]
                    self.put(function, node, f" {word} ".join(f"({text})" for text in kept))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self.put(function, node, f"bool({self.segment(operand)})")
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.BoolOp):
                self.put(function, test, f"(not ({self.segment(test)}))")
            case ast.Constant(value=bool() as value):
                self.put(function, node, str(not value))
            case ast.Constant(value=int() as value):
                self.put(function, node, str(value + 1))
            case ast.Call(keywords=keywords):
                given = sorted([*node.args, *keywords], key=lambda n: (n.lineno, n.col_offset))
                for keyword in (k for k in keywords if k.arg and len(given) > 1 and not _states(k)):
                    self.without(function, given, given.index(keyword))
            case ast.Set(elts=several) if len(several) > 1:
                for i in range(len(several)):
                    self.without(function, several, i)
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                self.put(function, node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if function:
                self.put(function, node, "pass")

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


def _states(node: ast.AST) -> bool:
    """zip(..., strict=True) asserts that as many are given."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _symbol(op: ast.AST) -> str:
    sample = ast.Compare(ast.Name("a"), [op], [ast.Name("b")])
    if not isinstance(op, ast.cmpop):
        sample = ast.BinOp(ast.Name("a"), op, ast.Name("b"))
    return ast.unparse(sample).split()[1]


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(s, ast.JoinedStr | ast.Constant) and not _number(s) for s in sides)


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]


def edits(text: str) -> Iterator[Edit]:
    """Every change to a Python source that stays one: what no parser takes, or what comes to the
    same, is left out."""
    finder = _Finder(text)
    finder.walk(ast.parse(text), "")
    same = ast.dump(ast.parse(text))
    for edit in sorted(set(finder.found), key=lambda e: (e.start, e.end, e.new)):
        try:
            made = ast.dump(ast.parse(edit.apply(text)))
        except SyntaxError:
            continue
        if made != same:
            yield edit
