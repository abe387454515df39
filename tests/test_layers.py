"""Who may import whom, and that reading events needs no torch.

The rules are read off the source, imports inside functions included: a dependency that is hidden is
still one.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvcache
from tests.support.commands import RunPython, python
from tests.support.places import ROOT
from tests.support.sources import PACKAGES, files, modules, parsed, parsed_file

ALLOWED = {
    "events": {"events"},
    "sinks": {"sinks", "events"},
    "cuda_ops": {"cuda_ops"},
    "kvcache": {"kvcache", "events"},
}
"""The packages of ours that each package may import."""

ALSO_ALLOWED = {
    "kvcache/device": {"cuda_ops"},
    "kvcache/pools.py": {"cuda_ops"},
    "kvcache/integrations": {"cuda_ops"},
    "kvcache/manager.py": {"sinks"},
    "kvcache/recorder.py": {"sinks"},
    "kvcache/record": {"sinks"},
    "kvcache/publish": {"sinks"},
    "kvcache/cli": {"sinks"},
}
"""What single files, or all files of a directory, may import besides."""

ALLOWED_AS_TYPES = {
    "kvcache/manager.py": {"cuda_ops"},
    "kvcache/integrations": {"sinks"},
    "kvcache/workload/copies.py": {"cuda_ops"},
}
"""What single files may import only in order to name types."""

DECIDE_AND_APPLY = sorted(
    path.relative_to(ROOT / "kvcache").as_posix()
    for place in ("fold/*.py", "decide/*.py", "inputs.py")
    for path in (ROOT / "kvcache").glob(place)
)
"""Modules of kvcache that must give the same result for the same events, today and in a replay."""

IMPURE = {
    "asyncio",
    "io",
    "os",
    "pathlib",
    "random",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
}


@cache
def imports(source: str) -> list[tuple[int, str, bool]]:
    """Return line, top-level package, and whether it is for type checkers only, of every import."""
    tree, found = parsed(source), []
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        found += [
            (getattr(node, "lineno", 0), name.partition(".")[0], id(node) in for_types) for name in names
        ]
    return found


def violations(path: str, source: str) -> list[str]:
    """The imports in a file that its place forbids, as `path:line: reason`."""
    allowed = ALLOWED[path.partition("/")[0]] | _of_place(ALSO_ALLOWED, path)
    types = allowed | _of_place(ALLOWED_AS_TYPES, path)
    return [
        f"{path}:{line}: imports {name}"
        for line, name, for_types in imports(source)
        if name in PACKAGES and name not in (types if for_types else allowed)
    ]


def _of_place(rules: dict[str, set[str]], path: str) -> set[str]:
    return {
        name
        for place, names in rules.items()
        if path == place or path.startswith(f"{place}/")
        for name in names
    }


def sources(package: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of every module of a package."""
    for file in files(package):
        yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_what_its_layer_allows(package: str) -> None:
    """No module imports a package of ours from a layer that it must not know."""
    found = list(sources(package))
    assert found
    assert [line for path, source in found for line in violations(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source", "lines"),
    [
        ("events/a.py", "import kvcache.fold.state", ["events/a.py:1: imports kvcache"]),
        ("events/a.py", "from sinks import base", ["events/a.py:1: imports sinks"]),
        ("sinks/a.py", "import events", []),
        ("sinks/a.py", "\ndef f():\n    import cuda_ops.torch_copier", ["sinks/a.py:3: imports cuda_ops"]),
        (
            "kvcache/fold/state.py",
            "if X:\n    from cuda_ops.torch_copier import A",
            ["kvcache/fold/state.py:2: imports cuda_ops"],
        ),
        ("kvcache/pools.py", "from cuda_ops.torch_copier import A", []),
        ("kvcache/cli/run.py", "import sinks.stdout", []),
        ("kvcache/manager.py", "if TYPE_CHECKING:\n    from cuda_ops.copier import Ticket", []),
        (
            "kvcache/manager.py",
            "from cuda_ops.copier import Ticket",
            ["kvcache/manager.py:1: imports cuda_ops"],
        ),
        (
            "kvcache/fold/state.py",
            "if TYPE_CHECKING:\n    import cuda_ops",
            ["kvcache/fold/state.py:2: imports cuda_ops"],
        ),
        ("kvcache/climb.py", "import sinks.stdout", ["kvcache/climb.py:1: imports sinks"]),
    ],
)
def test_check_sees_forbidden_imports(path: str, source: str, lines: list[str]) -> None:
    """The check finds imports in functions and under conditions, and knows the exceptions by their place."""
    assert violations(path, source) == lines


@pytest.mark.parametrize("module", DECIDE_AND_APPLY)
def test_decide_and_apply_are_pure(module: str) -> None:
    """What decides and applies has no clock, file, socket, thread, torch or randomness at hand."""
    source = (ROOT / "kvcache" / module).read_text(encoding="utf-8")
    assert {name for _, name, _ in imports(source)} & IMPURE == set()


@pytest.mark.parametrize("path", sorted((ROOT / "kvcache" / "fold").glob("*.py")), ids=lambda path: path.stem)
def test_state_knows_nothing_of_decisions(path: Path) -> None:
    """What applies events is the same whoever decided them, so it imports no decision."""
    assert "kvcache.decide" not in path.read_text(encoding="utf-8")


NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def test_events_and_sinks_need_no_torch(run_python: RunPython) -> None:
    """Every module of events and sinks can be imported where torch is not installed, and so can what reads."""
    done = run_python(
        NO_TORCH + "import events, sinks\n"
        "from importlib import import_module\n"
        "from pkgutil import walk_packages\n"
        "for package in (events, sinks):\n"
        "    for module in walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        import_module(module.name)\n"
        "import kvcache\n"
        "kvcache.Layout.of(kvcache.KVCacheConfig(max_sequence_length=8, primary_blocks=2))\n"
        "print(kvcache.errors.KVCacheError.__name__, kvcache.replay.__name__)\n"
    )
    assert (done.stdout, done.stderr) == ("KVCacheError kvcache.replay\n", "")


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the import of each package has loaded of what takes long: one process imports one after the other."""
    code = (
        "import json, sys\n"
        "found, heavy = {}, ['torch', 'transformers', 'yaml']\n"
        "for package in sys.argv[1:]:\n"
        "    __import__(package)\n"
        "    found[package] = [name for name in heavy if name in sys.modules]\n"
        "    heavy = [name for name in heavy if name not in found[package]]\n"
        "print(json.dumps(found))\n"
    )
    done = python(tmp_path_factory.mktemp("heavy"), code, *PACKAGES)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_no_torch(heavy: dict[str, list[str]], package: str) -> None:
    """Importing a package is cheap: torch is loaded only by what moves bytes."""
    assert heavy[package] == []


def test_integrations_are_imported_by_name_alone(run_python: RunPython) -> None:
    """The room of them needs nothing; each without its library says which extra to install."""
    done = run_python(
        "import sys; sys.modules['transformers'] = None\n"
        "import kvcache, kvcache.integrations\n"
        "assert 'torch' not in sys.modules\n"
        "try:\n"
        "    import kvcache.integrations.transformers\n"
        "except kvcache.errors.UsageError as error:\n"
        "    print(error)\n"
    )
    reported = "this cache requires Transformers: pip install 'kvcache[transformers]'\n"
    assert (done.stdout, done.stderr) == (reported, "")


def test_help_loads_hardly_anything(run_python: RunPython) -> None:
    """`kvcache --help` takes no longer than Python itself: it loads none of the libraries."""
    done = run_python(
        "import sys; from kvcache.cli import main; main(['--help'])\n"
        "heavy = ('numpy', 'msgspec', 'pydantic', 'structlog', 'zmq', 'torch', 'events', 'sinks')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""


class TestOwnPackages:
    """`kvcache` works only with the `events` and `sinks` that were installed with it."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        """An installation of which only kvcache's front is left."""
        site = tmp_path / "site"
        (site / "kvcache").mkdir(parents=True)
        for name in ("__init__.py", "_version.py"):
            (site / "kvcache" / name).write_text((ROOT / "kvcache" / name).read_text(encoding="utf-8"))
        return site

    @pytest.mark.parametrize("name", ["events", "sinks"])
    def test_foreign_package_is_refused(self, tmp_path: Path, run_python: RunPython, name: str) -> None:
        """A package of the same name before ours on the path is named, with what to do about it."""
        foreign = tmp_path / "foreign" / name
        foreign.mkdir(parents=True)
        (foreign / "__init__.py").write_text("class Events: pass\n")
        done = run_python("import kvcache", path=[foreign.parent])
        assert done.returncode != 0
        assert f"ImportError: kvcache needs its own package `{name}`" in done.stderr
        assert f"found {foreign / '__init__.py'}" in done.stderr
        assert "PyPI's `events` overwrites files of that name in place" in done.stderr
        assert f"pip uninstall {name}" in done.stderr

    def test_copy_from_elsewhere_is_refused(self, tmp_path: Path, run_python: RunPython) -> None:
        """A package that bears our mark but lies elsewhere belongs to another installation."""
        other = tmp_path / "other" / "sinks"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("KVCACHE_PACKAGE = 'kvcache'\n")
        done = run_python("import kvcache", path=[other.parent])
        assert f"found {other / '__init__.py'}" in done.stderr

    def test_files_overwritten_in_place_are_noticed(self, site: Path, run_python: RunPython) -> None:
        """A package in the right place whose files another distribution has overwritten is refused."""
        (site / "events").mkdir()
        (site / "events" / "__init__.py").write_text("from .events import Events\n")
        (site / "events" / "events.py").write_text("class Events: pass\n")
        done = run_python("import kvcache", path=[site])
        assert f"found {site / 'events' / '__init__.py'}" in done.stderr

    @pytest.mark.parametrize(
        ("directory", "found"), [(True, "found a directory without code"), (False, "finds nothing")]
    )
    def test_missing_package_is_named(
        self, site: Path, run_python: RunPython, directory: bool, found: str
    ) -> None:
        """An installation that lost its events package says so, even where a plain directory bears its name."""
        if directory:
            (site / "events").mkdir()
        elsewhere = "[each for each in sys.path if not os.path.isfile(each + '/events/__init__.py')]"
        done = run_python(f"import os, sys; sys.path = {elsewhere}; import kvcache", path=[site])
        assert f"`import events` {found}" in done.stderr


class TestPublicNames:
    """What `import kvcache` offers."""

    def test_all_is_sorted_and_complete(self) -> None:
        """Every public name can be had, is listed by dir(), and the list is sorted."""
        assert kvcache.__all__ == sorted(kvcache.__all__, key=lambda name: (not name.isupper(), name))
        assert set(kvcache.__all__) <= set(dir(kvcache))
        assert [name for name in kvcache.__all__ if getattr(kvcache, name) is None] == []

    def test_unknown_name(self) -> None:
        """A name that does not exist is an AttributeError, as in any module."""
        with pytest.raises(AttributeError, match="module 'kvcache' has no attribute 'Kvcachemanager'"):
            kvcache.Kvcachemanager  # noqa: B018

    def test_replay_is_the_module(self, run_python: RunPython) -> None:
        """`kvcache.replay` is the module whatever was imported before; its function has the same name."""
        done = run_python(
            "import os, msgspec, numpy, pydantic, structlog\n"
            "for first in ('import kvcache', 'import kvcache.replay', 'from kvcache.replay import replay'):\n"
            "    if not os.fork():\n"
            "        exec(first)\n"
            "        from kvcache import replay\n"
            "        import kvcache\n"
            "        print(replay is kvcache.replay, callable(replay.replay), flush=True)\n"
            "        os._exit(0)\n"
            "    os.wait()\n"
        )
        assert (done.stdout, done.stderr) == ("True True\n" * 3, "")


def imported_by(file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of ours that one imports, inside functions and for types as well."""
    found = set()
    for node in ast.walk(parsed_file(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known.keys() or {node.module}
    return found & known.keys()


def room(module: str, known: dict[str, Path]) -> str:
    """Where a module lies: its room, or itself if it lies in the root of a package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if known[module].name != "__init__.py" or len(parts) > 1 else module


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Those that can be reached from themselves."""
    found = []
    for start in sorted(edges):
        reached: set[str] = set()
        waiting = list(edges[start])
        while waiting:
            here = waiting.pop()
            if here not in reached:
                reached.add(here)
                waiting += edges.get(here, ())
        if start in reached:
            found.append(start)
    return found


def test_imports_go_one_way() -> None:
    """No module, and no room, imports itself by way of others."""
    known = modules()
    edges = {name: imported_by(file, known) - {name} for name, file in known.items()}
    assert circles(edges) == []
    rooms: dict[str, set[str]] = {}
    for name, others in edges.items():
        here = room(name, known)
        rooms.setdefault(here, set()).update({room(other, known) for other in others} - {here})
    assert circles(rooms) == []


def test_circles_are_seen() -> None:
    """The check for circles finds one, and only those that lie on it."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
