"""The house rules that a machine can read: who may import whom, what `import jfsdp` costs, what is public."""

import ast
import functools
import graphlib
import importlib
import importlib.resources
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import jfsdp
from jfsdp.extras import EXTRAS
from tests.refusals import refusing

PACKAGE = Path(jfsdp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Room -> the rooms, or single modules of rooms, that it may import besides itself; docs/design.md, "Packages".
PLANNED = [
    f"trainer.{name}"
    for name in ("generate", "job", "options", "parse", "preferences", "option_errors", "step", "run.config")
]
ALLOWED = {
    "arguments": (),
    "compat": ("extras",),
    "jaxprs": ("compat",),
    "layout": ("arguments", "compat", "launch.hosts"),
    "objects": ("extras", "launch.hosts"),
    "modules": ("arguments", "layout"),
    "context": ("arguments", "compat", "jaxprs", "layout.mesh", "layout.policy"),
    "float8": ("context.rows", "layout.codec", "layout.mesh"),
    "moe": ("arguments", "context.rows", "layout.mesh"),
    "engine": ("arguments", "compat", "context.rows", "jaxprs", "layout", "modules"),
    "train": (
        "arguments",
        "compat",
        "context.rows",
        "jaxprs",
        "layout",
        "modules",
        "engine",
        "float8",
        "moe",
        "launch.hosts",
    ),
    "checkpoint": (
        "arguments",
        "lazy",
        "compat",
        "layout",
        "train.state",
        "train.digest",
        "train.gather_leaf",
        "train.replicas",
        "train.reshard",
        "train.update.roles",
        "launch.hosts",
        "launch.environment",
        "objects",
    ),
    "trainer": (
        "arguments",
        "lazy",
        "compat",
        "context",
        "layout",
        "engine",
        "train",
        "checkpoint",
        "launch",
        "float8",
        "moe",
        "extras",
        "objects",
    ),
    "plan": (
        "arguments",
        "lazy",
        "compat",
        "context.rows",
        "jaxprs",
        "layout",
        "engine",
        "moe",
        "train",
        "launch.hosts",
        *PLANNED,
        "extras",
    ),
    "proof": ("arguments", "jaxprs", "layout", "modules", "train", "trainer.job", "trainer.options", "trainer.step"),
    "launch": ("arguments", "compat", "extras"),
    "testing": ("arguments", "engine", "layout", "train", "plan"),
    "lazy": (),
    "optim": ("layout", "train"),
    "peft": ("checkpoint",),
    "extras": (),
    "cli": ("",),  # everything
}
LAZY = ("jax", "flax", "optax", "orbax", "grain", "matplotlib", "tyro", "rich", "numpy")


def module_name(file: Path) -> str:
    """The dotted name below `jfsdp`; empty for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    return tuple(find_imports(file))


def find_imports(file: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, full names; `from a import b` gives `a.b` if that is a module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1 and file.parent != PACKAGE and PACKAGE not in file.parents:
                continue  # within models/, whose package has two names: models here, jfsdp_models installed
            assert node.module is not None and node.level == 0, f"{file}:{node.lineno}: relative import"
            for alias in node.names:
                is_module = (PACKAGE.parent / node.module.replace(".", "/") / f"{alias.name}.py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def is_below(name: str, ancestor: str) -> bool:
    return ancestor == "" or name == ancestor or name.startswith(ancestor + ".")


def violations(room: str) -> list[str]:
    found = []
    for file in FILES:
        importer = module_name(file)
        for imported in imports(file):
            if is_below(importer, room) and is_below(imported, "jfsdp"):
                inner = imported.removeprefix("jfsdp").removeprefix(".")
                # The package's front door (no inner name) leads into every room, so only `cli` may go through it.
                if not any(is_below(inner, other) for other in (room, *ALLOWED[room])):
                    found.append(f"{importer} imports {imported}")
    return found


def test_every_room_has_a_rule():
    assert {module_name(file).partition(".")[0] for file in FILES} - {"", "__main__"} == set(ALLOWED)


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_what_the_design_allows(room):
    assert violations(room) == []


def test_a_forbidden_import_would_be_seen(tmp_path, monkeypatch):
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "bad.py").write_text("import jfsdp\ndef f():\n    from jfsdp.engine.xla import XlaEngine\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "FILES", [tmp_path / "layout" / "bad.py"])
    assert violations("layout") == ["layout.bad imports jfsdp", "layout.bad imports jfsdp.engine.xla"]


def test_no_import_leads_back_to_where_it_stands():
    """In functions and for type checkers alike."""
    graph = {module_name(file): {name.removeprefix("jfsdp.") for name in imports(file)} for file in FILES}
    graph["layout.layout"].remove("layout.report")  # print(layout) is what report.py writes of it
    graphlib.TopologicalSorter({name: others & graph.keys() for name, others in graph.items()}).prepare()


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_only_modules_import_flax(file):
    if not is_below(module_name(file), "modules"):
        assert not [name for name in imports(file) if is_below(name, "flax")]


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_no_file_imports_private_jax_or_the_models_and_scripts_beside_the_package(file):
    unstable = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jax.experimental")
    if module_name(file) != "compat":
        assert not [name for name in imports(file) if any(is_below(name, other) for other in unstable)]
        assert "jax.__version_info__" not in file.read_text()
    forbidden = ("jaxlib", "models", "jfsdp_models", "scripts", "tests")
    assert not [name for name in imports(file) if any(is_below(name, other) for other in forbidden)]


@pytest.mark.parametrize("file", sorted((PACKAGE.parent / "models").glob("*.py")), ids=lambda file: file.stem)
def test_models_are_plain_flax_and_never_import_jfsdp(file):
    assert not [name for name in imports(file) if is_below(name, "jfsdp")]


def test_importing_jfsdp_loads_nothing_heavy():
    code = f"import sys, jfsdp; print([name for name in {LAZY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_core_loads_no_storage_data_or_command_line():
    """What is needed to shard and train is jax, flax and optax; the rest is loaded when it is used."""
    heavy = {"orbax", "grain", "matplotlib", "tyro", "tensorboardX", "tokenizers"}
    used = "jfsdp.fully_shard, jfsdp.checkpoint.save, jfsdp.checkpoint.Checkpointer, jfsdp.optim"
    code = f"import sys, jfsdp; {used}; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Makes packages look as if they were not installed, to the import system and to `find_spec`.
_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
import importlib.util as util
find = util.find_spec
def find_spec(name, package=None):
    try:
        return find(name, package)
    except ModuleNotFoundError:
        return None
util.find_spec = find_spec
"""


def run_without(packages, code):
    code = _WITHOUT.format(packages=set(packages)) + code
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)


def test_the_library_needs_no_extra():
    code = (
        "import jfsdp\nfor module in (jfsdp, jfsdp.checkpoint, jfsdp.optim, jfsdp.peft, jfsdp.plan, jfsdp.trainer):\n"
        "    [getattr(module, n) for n in module.__all__]"
    )
    done = run_without(EXTRAS["train"][:1] + EXTRAS["train"][2:], code)  # flax itself brings rich
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["explain", "--model", "llama-tiny"],
        ["models"],
        ["plan", "--recipe", "stdlib", "--analytic"],
        ["checkpoint", "--help"],
    ],
    ids=lambda command: command[0],
)
def test_commands_that_do_not_train_need_the_extra_cli_alone(command):
    others = [name for name in EXTRAS["train"] if name not in EXTRAS["cli"]]
    done = run_without(others, f"from jfsdp.cli import main; raise SystemExit(main({command}))")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "code", "extra"),
    [
        ("tyro", "from jfsdp.cli import main; raise SystemExit(main(['models']))", "cli"),
        ("grain", "import jfsdp.trainer.run.build", "train"),
        ("grain", "from jfsdp.trainer.data.iterator import read_in_caller; read_in_caller()", "train"),
        ("tyro", "import runpy, sys; runpy.run_path('scripts/train.py', run_name='__main__')", "train"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(package, code, extra):
    done = run_without([package], code)
    command = f"in the clone of jfsdp: pip install '.[{extra}]' -c constraints.txt"
    assert done.returncode and f"needs {package}; {command}" in done.stderr


def test_the_extras_are_those_of_the_distribution():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {name: [re.split(r"[>=\[]", item)[0] for item in project[name]] for name in EXTRAS}
    assert listed["cli"] == list(EXTRAS["cli"])
    assert listed["train"][1:] == [name for name in EXTRAS["train"] if name not in EXTRAS["cli"]]


def test_the_version_is_that_of_the_distribution():
    assert jfsdp.__version__ == tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["version"]


def test_public_names_are_few_and_listed_by_dir():
    assert len(jfsdp.__all__) == len(set(jfsdp.__all__))
    assert len(jfsdp.__all__) <= 34
    assert {*jfsdp.__all__, "checkpoint", "optim", "peft", "plan", "trainer"} <= set(dir(jfsdp))


NAMESPACES = (jfsdp, jfsdp.checkpoint, jfsdp.optim, jfsdp.peft, jfsdp.plan, jfsdp.trainer)
PUBLIC = {f"{module.__name__}.{name}": (module, name) for module in NAMESPACES for name in module.__all__}


@pytest.mark.parametrize("path", PUBLIC)
def test_public_names_resolve_and_are_documented(path):
    module, name = PUBLIC[path]
    value = getattr(module, name)
    if callable(value):
        doc = inspect.getdoc(value) or ""
        assert doc
        assert not doc.startswith(f"{name}("), "a dataclass without a docstring of its own"


def test_an_unknown_name_is_an_attribute_error():
    with refusing("'jfsdp'", "'fully_shart'", error=AttributeError):
        _ = jfsdp.fully_shart  # pyright: ignore[reportAttributeAccessIssue]


def test_a_type_checker_resolves_the_package_outside_of_the_clone(tmp_path):
    """As an editor does after `make install`: it reads paths in .pth files and py.typed, and no import hooks."""
    (tmp_path / "user.py").write_text("import jfsdp\nreveal_type(jfsdp.fully_shard)\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "user.py"]
    found = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout)
    assert found["summary"]["errorCount"] == 0, found
    assert "-> ShardedModel" in found["generalDiagnostics"][0]["message"]
    assert importlib.resources.files("jfsdp").joinpath("py.typed").is_file()
