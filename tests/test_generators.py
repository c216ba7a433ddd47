"""No generator gives a value while a mode of torch is on: left alone, it would leave it on."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "engram"
MODES = {
    *("no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "fork_rng"),
    *("dual_level", "sdpa_kernel", "plain_attention", "state_preserved", "functional_call"),
}


def is_context(function: ast.FunctionDef) -> bool:
    """A context manager is closed by the statement that opened it."""
    names = (n.id if isinstance(n, ast.Name) else "" for n in function.decorator_list)
    return "contextmanager" in names


def name_of(item: ast.withitem) -> str:
    call = item.context_expr
    function = call.func if isinstance(call, ast.Call) else call
    return getattr(function, "attr", getattr(function, "id", ""))


def test_no_value_is_given_while_a_mode_is_on() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or is_context(function):
                continue
            for block in ast.walk(function):
                if isinstance(block, ast.With) and MODES & set(map(name_of, block.items)):
                    found = [
                        n for n in ast.walk(block) if isinstance(n, (ast.Yield, ast.YieldFrom))
                    ]
                    wrong += [f"{path.relative_to(SOURCE)}:{n.lineno}" for n in found]
    assert wrong == []
