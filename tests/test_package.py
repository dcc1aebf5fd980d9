"""`import gonio`: lazy names in a fresh interpreter, one list of them, and every exception exported."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gonio
from gonio import errors

ROOT = Path(__file__).resolve().parents[1]
FRESH = """
import sys, gonio
assert "torch" not in sys.modules, "import gonio imports torch"
assert dir(gonio) == sorted(gonio.__all__)
print(getattr(gonio, sys.argv[1]))
assert "torch._dynamo" not in sys.modules, "torch's compiler is imported, which takes 2 s"
"""


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["errors", "seeding", "penalty", "geometry", "measure", "GonioError", "__version__"])
def test_a_name_is_loaded_on_first_use_in_a_fresh_interpreter(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", FRESH, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


DRAWS = """
import random, sys, torch, gonio
random.seed(0)
before, model = random.getstate(), torch.nn.Linear(4, 4)
exec(sys.argv[1])
assert any(name == "rich" or name.startswith("rich.") for name in sys.modules), "nothing was imported that draws"
assert random.getstate() == before
"""


@pytest.mark.parametrize(
    "use",
    [
        "gonio.measure(model)",
        "gonio.doctor(model, batch=torch.ones(2, 4))",
        "from gonio.escaping import printed; printed('')",
        "gonio.lab.Task",
        "gonio.Tracker(model)",
    ],
)
def test_first_use_leaves_pythons_generator_as_it_was(use: str) -> None:
    done = subprocess.run([sys.executable, "-c", DRAWS, use], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_listed_name_exists_and_is_the_one_of_its_package() -> None:
    assert len(set(gonio.__all__)) == len(gonio.__all__)
    for package, names in gonio._EXPORTS.items():
        assert inspect.ismodule(getattr(gonio, package))
        for name in names:
            assert getattr(gonio, name) is getattr(getattr(gonio, package), name)
    with pytest.raises(AttributeError, match="module 'gonio' has no attribute 'measured'"):
        gonio.measured  # noqa: B018


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("retrain_", ". Did you mean gonio.lab.retrain_?"), ("recycle", ". Did you mean gonio.recycle_?"),
        ("anatomy", ". Did you mean gonio.surgery.anatomy?"), ("measured", ". Did you mean gonio.measure, "),
        ("Orthogonalty", ". Did you mean gonio.regularizers.Orthogonality, "), ("qqqqqq", ""), ("__wrapped__", ""),
    ],
)  # fmt: skip
def test_a_name_that_is_elsewhere_is_found(name: str, near: str) -> None:
    with pytest.raises(AttributeError, match="module 'gonio' has no attribute") as caught:
        getattr(gonio, name)
    said = str(caught.value).removeprefix(f"module 'gonio' has no attribute {name!r}")
    assert said.startswith(near)
    assert bool(said) == bool(near)


def test_to_look_for_a_name_loads_nothing() -> None:
    code = "import sys, gonio; from gonio import escaping; print(hasattr(gonio, 'retrain_'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(inspect.getsource(gonio))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(gonio.__all__) - {"__version__"}


def test_exactly_the_exceptions_are_exported() -> None:
    """Both directions: ConfigError was defined and not listed."""
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert set(errors.__all__) == defined


def test_messages_name_the_problem_what_was_found_and_what_to_do() -> None:
    refused = errors.NotApplicableError("swap_", "0", "it is the model itself", "Replace it yourself.")
    assert str(refused) == "swap_: cannot be applied to '0'; it is the model itself. Replace it yourself."
    assert "cannot be applied to the model; " in str(errors.NotApplicableError("fold_", "", "why", "Do."))
    nothing = errors.NoMatchError("swap_", "layr1", ["layer1", "layer2"])
    assert str(nothing) == (
        "swap_: where=layr1 selects no module. Suitable modules: layer1, layer2. Did you mean layer1, layer2?"
    )
    assert "it selects only fc (no weight). The model has no suitable" in str(
        errors.NoMatchError("L2", "fc", [], refused={"fc": "no weight"})
    )
    assert str(errors.NoMatchError("L2", None, [])) == "L2: no module of the model is suitable."
    every = errors.NoMatchError("L2", None, [], refused={"0": "no weight", "1": "no weight"})
    assert str(every) == "L2: no module is suitable; found 0 and 1 (no weight)."
    many = {"": "no weight", "0": "meta", **{f"{n}": "no weight" for n in range(1, 12)}}
    assert str(errors.NoMatchError("L2", None, [], refused=many)) == (
        "L2: no module is suitable; found 12 modules (no weight; the first is the model), 0 (meta)."
    )
    found = errors.ConfigError("gonio.toml", ["line 1: no such key", "line 2: not a number"])
    assert str(found).splitlines()[1:3] == ["  line 1: no such key", "  line 2: not a number"]


ERRORS = (
    errors.InvalidArgumentError("a", "b", "c"),
    errors.UnknownNameError("layer", "conv", ["conv1"]),
    errors.MissingExtraError("measuring", "ray", "ray"),
    errors.RecipeError("r.toml", ["one", "two"]),
    errors.ConfigError("gonio.toml", ["line 1: no such key", "line 2: not a number"]),
    errors.PlanChangedError("study", [("seeds", "2", "3")]),
    errors.UnreadableFileError("w.pt", "nothing", "Save it again."),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_another_process_arrives_whole(error: errors.GonioError) -> None:
    error.add_note("while reading")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert getattr(again, "name", None) == getattr(error, "name", None)


def test_a_renamed_name_warns_at_the_line_that_uses_it() -> None:
    def old() -> None:
        errors.warn_renamed("gonio.old_", "gonio.new_", since="0.3")

    message = r"^gonio\.old_ is deprecated since gonio 0\.3 .*; use gonio\.new_$"
    with pytest.warns(DeprecationWarning, match=message) as said:
        old()
    assert said[0].filename == __file__


def test_each_extra_that_an_error_names_installs_the_package() -> None:
    """`import_extra(…, package=…, extra=…)` tells a user what to install."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    calls = [
        {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
        for path in (ROOT / "src").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "import_extra"
    ]
    named = {(call["extra"], call["package"]) for call in calls if call.get("extra") and "package" in call}
    assert ("lab", "optuna") in named
    for extra, package in named - {("lab", "Pillow")}:  # which Matplotlib installs
        assert any(re.match(rf"{re.escape(package)}\b", line) for line in declared[extra]), (
            f"{package} is not in {extra}"
        )
