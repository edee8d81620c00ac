# SPDX-License-Identifier: Apache-2.0
"""The house rules hold for this checkout, and each tool notices when one is broken."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build/py3-none-linux_x86_64"


def run(tool: str, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([ROOT / "tools" / tool, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def compile_object(folder: Path, text: str) -> Path:
    source, target = folder / "isa.cpp", folder / "isa.o"
    source.write_text(text)
    subprocess.run(["g++", "-std=c++20", "-O0", "-c", source, "-o", target], check=True)
    return target


def compile_library(folder: Path, name: str, text: str) -> Path:
    (folder / "lib.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-shared", "-fPIC", folder / "lib.cpp", "-o", folder / name]
    subprocess.run(command, check=True)
    return folder / name


def test_layers_hold() -> None:
    status, text = run("check_layers")
    assert status == 0, text
    assert int(re.search(r"(\d+) units", text)[1]) > 0


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"src/base/a.h": '#include "kernel/b.h"\n'}, "base must not include kernel/b"),
        ({"src/store/a.cpp": '#include "kernel/b.h"\n'}, "store must not include kernel/b"),
        ({"src/format/a.cpp": '#include "stowage/file.h"\n'}, "format must not include stowage/fi"),
        (
            {"src/kernel/a.cpp": "#include <torch/extension.h>\n"},
            "only src/torch may include torch",
        ),
        ({"src/c/a.cpp": '#include "plan/b.h"\n'}, "c must not include plan/b"),
        ({"src/plan/a.cpp": '#include "stowage.h"\n'}, "plan must not include stowage"),
        ({"src/new/a.h": ""}, "no layer"),
        (
            {"src/kernel/a.cpp": '#include "format/reference.h"\n'},
            "only tests may include format/reference",
        ),
        (
            {"src/format/reference.cpp": '#include "format/convert.h"\n'},
            "the oracle must not include format/convert",
        ),
        ({"src/store/a.cpp": "if (format.bits == 4) return;\n"}, "must ask stowage/descriptor.h"),
        (
            {"src/base/a.h": '#include "base/b.h"\n', "src/base/b.h": '#include "base/a.h"\n'},
            "cycle: base/",
        ),
        (
            {
                "src/base/a.h": "",
                "src/base/a.cpp": '#include "base/a.h"\n#include "base/b.h"\n',
                "src/base/b.h": '#include "base/a.h"\n',
            },
            "cycle: base/",
        ),
        (
            {
                "python/stowage/a.py": "def f():\n    from stowage import b\n",
                "python/stowage/b.py": "from stowage.a import f\n",
            },
            "cycle: stowage/",
        ),
        (
            {
                "python/stowage/__init__.py": "from stowage.a import f\n",
                "python/stowage/a.py": "from stowage import g\n",
            },
            "cycle: stowage/",
        ),
        (
            {
                "python/stowage/_ops/a.py": "from stowage._tensor import b\n",
                "python/stowage/_tensor/b.py": "",
            },
            "_ops must not import stowage/_tensor/b",
        ),
        (
            {"python/stowage/_ops/a.py": "from stowage import b\n", "python/stowage/b.py": ""},
            "_ops must not import stowage/b",
        ),
        (
            {
                "python/stowage/_ops/x/a.py": "from stowage._ops.y import b\n",
                "python/stowage/_ops/x/c.py": "",
                "python/stowage/_ops/y/b.py": "",
                "python/stowage/_ops/y/d.py": "from stowage._ops.x import c\n",
            },
            "stowage/_ops: cycle of its parts: ",
        ),
        ({"python/stowage/b.py": "class B: ...\n"}, "must define nothing"),
    ],
)
def test_layers_notice(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    status, text = run("check_layers", write(tmp_path, files))
    assert status == 1 and complaint in text, text


def test_layers_allow_what_points_down(tmp_path: Path) -> None:
    files = {
        "src/store/a.cpp": '#include "store/a.h"\n#include "stowage/weight.h"\n',
        "src/store/a.h": '#include "base/env.h"\n',
        "python/stowage/ops.py": "",
        "python/stowage/modules.py": "from stowage import ops\nimport torch\n",
    }
    assert run("check_layers", write(tmp_path, files))[0] == 0


def test_sizes_hold() -> None:
    status, text = run("check_sizes")
    assert status == 0, text


LONG_BODY = "  f(1);\n" * 60


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"src/base/a.cpp": "// x\n" * 501}, "501 lines, cap 500"),
        ({"python/stowage/a.py": "# x\n" * 501}, "501 lines, cap 500"),
        ({"include/stowage/a.h": "// x\n" * 201}, "201 lines, cap 200"),
        ({"src/base/a.cpp": "namespace a {\nint f(int x) {\n" + LONG_BODY + "}\n}\n"}, "of 62"),
        ({"src/base/a.cpp": "class A {\n  void f() const {\n" + LONG_BODY + "}\n};\n"}, "of 62"),
        ({"python/stowage/a.py": "def f():\n" + "    g()\n" * 60}, "of 61, cap 60"),
        ({"python/stowage/a.py": 'def f():\n    """x"""\n' + "    g()\n" * 60}, "of 61, cap 60"),
    ],
)
def test_sizes_notice(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    status, text = run("check_sizes", write(tmp_path, files))
    assert status == 1 and complaint in text, text


def test_sizes_notice_what_git_has(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "core").write_bytes(b"0" * (1 << 20) + b"1")
    assert run("check_sizes", tmp_path)[0] == 0
    subprocess.run([*git, "add", "core"], check=True)
    status, text = run("check_sizes", tmp_path)
    assert status == 1 and "core: 1048577 bytes, cap 1048576" in text, text


def test_sizes_leave_classes_and_tables_alone(tmp_path: Path) -> None:
    members = "  int f() { return '{'; }\n" * 70
    table = "constexpr int kTable[] = {\n" + "    1,\n" * 70 + "};\n"
    status, text = run(
        "check_sizes", write(tmp_path, {"src/a/a.cpp": f"class A {{\n{members}}};\n{table}"})
    )
    assert status == 0 and "functions: 70, p50 1, p90 1, largest 1" in text, text


def test_symbols_hold() -> None:
    objects = sorted(TREE.glob("src/kernel/**/cpu/*.cpp.o"))
    libraries = [TREE / "src/libstowage.so", TREE / "src/torch/stowage_torch.so"]
    if not TREE.exists():
        pytest.skip("needs the tree that pip builds the wheel in: make build")
    assert {"avx2.cpp.o", "avx512.cpp.o", "avx512bf16.cpp.o", "amx.cpp.o", "scalar.cpp.o"} <= {
        path.name for path in objects
    }
    status, text = run("check_symbols", *objects, *libraries)
    assert status == 0, text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("inline int f(int x) { return x; }\nextern const int k = f(1);\n", "weak symbol f(int)"),
        ("int f() { return 1; }\nint g() { return 2; }\n", "one strong symbol expected, got 2"),
        ("static int f() { return 1; }\n", "one strong symbol expected, got 0"),
    ],
)
def test_symbols_notice_objects(tmp_path: Path, text: str, complaint: str) -> None:
    status, output = run("check_symbols", compile_object(tmp_path, text))
    assert status == 1 and complaint in output, output


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("libstowage.so", "namespace nlohmann { void f() {} }\n", "exports nlohmann::f()"),
        ("libstowage.so", 'extern "C" void strange() {}\n', "exports strange"),
        ("libstowage.so", "namespace stowage { static void f() {} }\n", "exports nothing"),
        (
            "stowage_torch.so",
            "namespace at { void f(); }\nvoid g() { at::f(); }\n",
            "needs at::f()",
        ),
        (
            "stowage_torch.so",
            'extern "C" void PyErr_Clear();\nvoid g() { PyErr_Clear(); }\n',
            "PyErr_",
        ),
    ],
)
def test_symbols_notice_libraries(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    status, output = run("check_symbols", compile_library(tmp_path, name, text))
    assert status == 1 and complaint in output, output


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_python_is_clean(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--quiet", ROOT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_cpp_is_formatted() -> None:
    clang_format = Path(sys.executable).parent / "clang-format"
    if not clang_format.exists():
        pytest.skip("needs clang-format 14 in the virtual environment: make setup")
    folders = (ROOT / "include", ROOT / "src", ROOT / "tests")
    files = [p for d in folders for p in d.rglob("*") if p.suffix in {".h", ".cpp", ".c"}]
    done = subprocess.run(
        [clang_format, "--dry-run", "-Werror", *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_environment_page_matches_the_table() -> None:
    source = (ROOT / "src/base/env.cpp").read_text()
    table = re.sub(r'"\s*\n\s*"', "", source[source.index("kTable") : source.index("}};")])
    rows = re.findall(r'\{Variable::\w+, "(\w+)",\s*"([^"]+)",\s*"([^"]+)"\}', table)
    page = (ROOT / "docs/env.md").read_text()
    assert rows and rows == re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    readers = [p for p in (ROOT / "src").rglob("*.cpp") if "getenv" in p.read_text()]
    assert readers == [ROOT / "src/base/env.cpp"]


def test_errors_page_lists_every_refusal() -> None:
    source = (ROOT / "src/store/refusal.cpp").read_text()
    rows = re.findall(r'\{Refusal::\w+, "(\w+)",\s*"([^"]+)"\}', source)
    page = (ROOT / "docs/errors.md").read_text()
    assert rows and rows == re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", page, re.M)


@pytest.mark.slow
def test_python_is_typed() -> None:
    pytest.importorskip("mypy", reason="needs mypy in the virtual environment: make setup")
    files = ["python/stowage", "tests/shared/typed_calls.py"]
    command = [sys.executable, "-m", "mypy", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


JUNIT = """<testsuites><testsuite>
<testcase classname="test_hooks.Tester" name="test_a"/>
<testcase classname="tests.test_hooks.Tester" name="test_b"><failure/></testcase>
<testcase classname="test_hooks.Tester" name="test_c"><skipped/></testcase>
</testsuite></testsuites>"""


def test_peers_lists_must_be_exact(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools/test_peers"))
    (tmp_path / "report.xml").write_text(JUNIT)
    passed, failed = tool["outcomes"](tmp_path / "report.xml")
    a, b = "test_hooks.py::Tester::test_a", "test_hooks.py::Tester::test_b"
    assert (passed, failed) == ({a}, {b})
    many = {str(i) for i in range(99)}
    differences = tool["differences"]
    assert differences("accelerate", many, failed, {b}) == []
    assert differences("accelerate", many, failed, set()) == [
        f"{b} fails, and is not in tests/peers/accelerate.txt"
    ]
    assert differences("accelerate", many, set(), {b}) == [
        f"{b} does not fail, and is in tests/peers/accelerate.txt"
    ]
    assert "at least" in differences("accelerate", passed, failed, {b})[0]
    for line in tool["listed"]("accelerate"):
        assert re.fullmatch(r"test_\w+\.py::\w+::\w+", line)


def test_other_torches_run_tests_that_are_there() -> None:
    tool = runpy.run_path(str(ROOT / "tools/test_torches"))
    assert tool["TESTS"] and all((ROOT / path).is_file() for path in tool["TESTS"])
