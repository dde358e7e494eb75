"""What ``torch.compile`` looks up and guards, by the short way and by the long one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from enum import Enum, StrEnum
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.testing import CompileCounter
from torch._dynamo.variables.base import VariableTracker
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt import regroup, regroup_as_dict
from torchrec_kt.modules import _compiled
from torchrec_kt.ops import RegroupPlan, regroup_values

from .helpers import (
    GROUPS,
    LAYOUT,
    NAMES,
    OTHER_INPUTS,
    Kts,
    Layout,
    make_kts,
    module,
    reference,
    same,
    values_of,
)

Callee = Callable[[Kts, list[list[str]]], list[Tensor]]


class OnGroups(nn.Module):
    """The module with its groups as a second argument of the caller, like the functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = module(GROUPS)

    def forward(self, kts: Kts, groups: list[list[str]]) -> list[Tensor]:
        self.inner._groups = groups
        return list(self.inner(kts).values())


CALLEES: dict[str, Callable[[], Callee]] = {
    "module": OnGroups,
    "regroup": lambda: regroup,
    "regroup_as_dict": lambda: lambda kts, groups: list(regroup_as_dict(kts, groups, NAMES).values()),
}


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each look-up whether it was done in one step."""
    found: list[bool] = []
    guarded_call, set_locals = _compiled.dynamo.guarded_call, _compiled.dynamo.set_locals

    def begins(*arguments: Any) -> Any:
        found.append(False)
        return guarded_call(*arguments)

    def ends(*arguments: Any, **constants: Any) -> None:
        set_locals(*arguments, **constants)
        found[-1] = True

    monkeypatch.setattr(_compiled.dynamo, "guarded_call", begins)
    monkeypatch.setattr(_compiled.dynamo, "set_locals", ends)
    return found


def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "dynamo", None)


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("something was renamed")

    monkeypatch.setattr(_compiled.dynamo, "guarded_call", fail)


def failing_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError("something was renamed")

    monkeypatch.setattr(_compiled.dynamo, "set_locals", fail)


def failing_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        @staticmethod
        def build(compiler: Any, value: Any) -> Any:
            if type(value) is tuple:
                raise AttributeError("something was renamed")
            return VariableTracker.build(compiler, value)

    monkeypatch.setattr(_compiled.dynamo, "VariableTracker", Tracker)


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "in one step": lambda monkeypatch: None,
    "without the compiler's hook": no_dynamo,
    "with a hook that fails": failing,
    "with a hook that fails late": failing_late,
    "with a hook that fails in between": failing_in_between,
}


# --- guards ----------------------------------------------------------------------------------------


def guards_on_values(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes down the guards on values that are built from here on."""
    found: list[Any] = []
    guard = GuardBuilder.EQUALS_MATCH

    @functools.wraps(guard)
    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(arguments)
        return guard(self, *arguments, **options)

    monkeypatch.setattr(GuardBuilder, "EQUALS_MATCH", counting)
    return found


def many_keys(callee: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Guards on values, when 400 keys are regrouped."""
    found = guards_on_values(monkeypatch)
    names = [f"k{i}" for i in range(400)]
    kts = make_kts([(names[:200], [2] * 200), (names[200:], [2] * 200)])
    groups = [names[::2], names[1::2]]
    call = CALLEES[callee]()
    assert same(torch.compile(call, fullgraph=True, backend="eager")(kts, groups), reference(kts, groups))
    return len(found)


@pytest.mark.parametrize("callee", CALLEES)
def test_every_list_has_one_guard(callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert many_keys(callee, monkeypatch) < 30


@pytest.mark.parametrize("callee", CALLEES)
def test_the_long_way_guards_every_name(callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_dynamo(monkeypatch)
    assert many_keys(callee, monkeypatch) > 800


# --- the short way is taken -----------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("callee", CALLEES)
def test_inputs_are_looked_up_in_one_step(callee: str, dynamic: bool | None, looked_up: list[bool]) -> None:
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager", dynamic=dynamic)
    for other in ("same", "other batch", "keys swapped", "widths grown", "one more input", "key_dim 0"):
        kts = OTHER_INPUTS[other]()
        assert same(call(kts, GROUPS), reference(kts, GROUPS))
    assert looked_up
    assert all(looked_up)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("callee", CALLEES)
def test_keyed_tensors_made_inside_are_looked_up_in_one_step(
    callee: str, dynamic: bool | None, looked_up: list[bool]
) -> None:
    inner = CALLEES[callee]()

    def call(first: Tensor, second: Tensor) -> list[Tensor]:
        # One width is written down, the other is one that the compiler may let vary.
        second_width = second.shape[1] - 2
        kts = [
            KeyedTensor(["a", "b"], [3, 5], first),
            KeyedTensor(["c", "d"], [2, second_width], second),
        ]
        return inner(kts, GROUPS)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for batch, width in ((3, 4), (5, 4), (3, 7), (2, 9)):
        kts = make_kts([(["a", "b"], [3, 5]), (["c", "d"], [2, width])], batch)
        assert same(compiled(*values_of(kts)), reference(kts, GROUPS))
    assert looked_up
    assert all(looked_up)


def test_strict_export_looks_up_in_one_step(looked_up: list[bool]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.regroup = module(GROUPS)

        def forward(self, first: Tensor, second: Tensor) -> Any:
            return self.regroup(
                [KeyedTensor(list(k), list(w), v) for (k, w), v in zip(LAYOUT, (first, second))]
            )

    kts = make_kts()
    program = torch.export.export(Model(), tuple(values_of(kts)), strict=True)
    assert same(program.module()(*values_of(kts)).values(), reference(kts, GROUPS))
    assert looked_up == [True]


# --- every way is right ---------------------------------------------------------------------------


@pytest.mark.parametrize("callee", ["module", "regroup"])
@pytest.mark.parametrize("way", ["in one step", "without the compiler's hook"])
def test_every_other_input_is_compiled_anew(way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=100):
        for other in (
            "same",
            "keys swapped, widths in place",
            "inputs swapped",
            "widths changed, total kept",
            "more keys",
            "one more input in front",
            "key_dim 0, square",
        ):
            kts = OTHER_INPUTS[other]()
            assert same(call(kts, GROUPS), reference(kts, GROUPS))
        kts = make_kts()  # the code of the first call is still there and right
        assert same(call(kts, GROUPS), reference(kts, GROUPS))


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_equal_names_in_other_lists_run_the_same_code(
    way: str, callee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    counter = CompileCounter()
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend=counter)
    for _ in range(3):
        kts = make_kts([(["".join(key) for key in keys], widths) for keys, widths in LAYOUT])
        assert same(call(kts, [list(group) for group in GROUPS]), reference(kts, GROUPS))
    assert counter.frame_count == 1


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_lists_changed_in_place_between_calls(way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager")
    kts = make_kts([(["a", "b"], [3, 5]), (["c", "d"], [4, 4])])
    groups = [list(group) for group in GROUPS]
    assert same(call(kts, groups), reference(kts, groups))
    kts[1]._keys.reverse()
    assert same(call(kts, groups), reference(kts, groups))
    kts[0]._length_per_key[:] = [5, 3]
    assert same(call(kts, groups), reference(kts, groups))
    groups[0][:] = ["d", "b", "d"]
    assert same(call(kts, groups), reference(kts, groups))


class Holding(nn.Module):
    """Holds the lists of its KeyedTensors, and looks at them itself too."""

    def __init__(self, callee: str, looks: str, layout: Layout = LAYOUT, groups: list[list[str]] = GROUPS):
        super().__init__()
        self.inner, self.looks = CALLEES[callee](), looks
        self.names = [list(names) for names, _ in layout]
        self.widths = [list(widths) for _, widths in layout]
        self.groups = [list(group) for group in groups]

    def look(self) -> int:
        found = 0
        if "names" in self.looks:
            found += sum(n for row in self.names for n, name in enumerate(row) if name in ("b", "c"))
        if "widths" in self.looks:
            found += sum(n * width for row in self.widths for n, width in enumerate(row))
        if "groups" in self.looks:
            found += 100 * self.groups[0].index("a")
        if "lengths" in self.looks:
            found += len(self.groups[0]) + len(self.groups[1])
        if "identity" in self.looks:
            found += 1000 * (self.groups[0] is self.groups[-1]) + 10000 * (self.names[0] is self.groups[0])
        return found

    def forward(self, *values: Tensor) -> list[Tensor]:
        before = self.look() if "before" in self.looks else 0
        kts = [KeyedTensor(*parts) for parts in zip(self.names, self.widths, values)]
        outs = self.inner(kts, self.groups)
        after = self.look() if "after" in self.looks else 0
        return [out + before + 2 * after for out in outs]


HELD_CHANGES: dict[str, Callable[[Holding], None]] = {
    "nothing": lambda model: None,
    "equal lists": lambda model: setattr(model, "names", [list(row) for row in model.names]),
    "names": lambda model: model.names[1].reverse(),
    "names and widths": lambda model: (model.names[0].reverse(), model.widths[0].reverse()),  # pyright: ignore
    "widths": lambda model: model.widths[0].reverse(),
    "a group": lambda model: model.groups[0].reverse(),
    "a longer group": lambda model: model.groups[0].append("d"),
    "a new group": lambda model: model.groups.__setitem__(0, ["a", "d"]),
    "groups made one": lambda model: model.groups.__setitem__(1, model.groups[0]),
    "names for a group": lambda model: model.groups.__setitem__(0, model.names[0]),
}


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "looks",
    [
        "not at all",
        "before: names",
        "before: widths",
        "after: names, widths",
        "before and after: groups",
        "before: names, widths, groups, identity",
    ],
)
def test_lists_that_a_model_holds(looks: str, way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    model = Holding(callee, looks)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    values = values_of(make_kts())
    with torch._dynamo.config.patch(recompile_limit=100):
        for change in HELD_CHANGES.values():
            change(model)
            expected = model(*values)
            for _ in range(2):
                assert same(compiled(*values), expected)


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("looks", ["not at all", "before: lengths", "before: names, widths, groups"])
def test_lists_that_a_model_holds_have_one_guard(
    looks: str, callee: str, monkeypatch: pytest.MonkeyPatch, looked_up: list[bool]
) -> None:
    layout = [([f"{c}{i}" for i in range(200)], [2] * 200) for c in "pq"]
    layout[0][0][:2] = ["a", "b"]
    names = layout[0][0] + layout[1][0]
    model = Holding(callee, looks, layout, [names[::2], names[1::2]])
    values = values_of(make_kts(layout))
    guards = guards_on_values(monkeypatch)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert same(compiled(*values), model(*values))
    assert len(guards) < 30
    assert looked_up == [True]


class Name(str):
    """Equal to a plain string, and not one."""

    def upper(self) -> str:
        return "another"


class Key(StrEnum):
    A = "a"


def one_regroup(callee: Callee, kts: Kts, groups: list[list[str]]) -> list[Tensor]:
    return callee(kts, groups)


def two_regroups(callee: Callee, kts: Kts, groups: list[list[str]]) -> list[Tensor]:
    return [*callee(kts, groups), *callee(kts, [["b"], groups[0]])]


# What code makes of a name or a width, and what of the same value may make a difference to it.
TYPE_USES: dict[str, tuple[Callable[[str, int], Any], str | int]] = {
    "a subclass": (lambda name, width: isinstance(name, Name), Name("a")),
    "a subclass, with its value": (lambda name, width: name == "a" and isinstance(name, Name), Name("a")),
    "a method": (lambda name, width: len(name.upper()), Name("a")),
    "an enum": (lambda name, width: name == "a" and isinstance(name, Enum), Key.A),
    "text of an enum": (lambda name, width: len(f"{name}-"), Key.A),
    "a flag": (lambda name, width: width == 1 and isinstance(width, bool), True),
    "a tensor of a flag": (lambda name, width: (~torch.tensor(width)).long(), True),
}


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("regroups", [one_regroup, two_regroups])
@pytest.mark.parametrize("use", TYPE_USES)
def test_the_type_of_an_item(
    use: str, regroups: Callable[..., list[Tensor]], way: str, callee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal items of another type: what compiled code asked about them, it asks again."""
    WAYS[way](monkeypatch)
    inner = CALLEES[callee]()
    look, other = TYPE_USES[use]

    def asking(values: Tensor, names: list[str], widths: list[int], groups: list[list[str]]) -> list[Tensor]:
        kts = [KeyedTensor(names, widths, values)]
        before = look(groups[0][0], widths[0]) + 2 * look(names[0], widths[0])
        outs = regroups(inner, kts, groups)
        return [out + before + 4 * look(groups[0][0], widths[0]) for out in outs]

    values = torch.randn(2, 4)
    compiled = torch.compile(asking, backend="eager")
    name, width = (other, 1) if isinstance(other, str) else ("a", other)
    for names, widths, groups in (
        (["a", "b"], [1, 3], [["a"], ["b"]]),
        ([name, "b"], [width, 3], [["a"], ["b"]]),
        (["a", "b"], [1, 3], [[name], ["b"]]),
        (["a", "b"], [1, 3], [["a"], ["b"]]),
    ):
        assert same(compiled(values, names, widths, groups), asking(values, names, widths, groups))


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_in_a_list_before_the_code_filled_it(
    way: str, callee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    inner = CALLEES[callee]()

    def filling(kts: Kts, group: list[str]) -> list[Tensor]:
        group[0] = "a"
        return inner(kts, [group, ["b"]])

    kts, counter = make_kts(), CompileCounter()
    compiled = torch.compile(filling, fullgraph=True, backend=counter)
    for before in ("x", "y", "z"):
        group = [before, "c"]
        assert same(compiled(kts, group), reference(kts, [["a", "c"], ["b"]]))
        assert group == ["a", "c"]
    assert counter.frame_count == 1


def no_guards(_: Any) -> None:
    TracingContext.get().guards_context.skip_install = True


def guards_again(_: Any) -> None:
    TracingContext.get().guards_context.skip_install = False


def test_no_guard_is_dropped_where_none_is_taken() -> None:
    def regroup_without_guards(kts: Kts, groups: list[list[str]]) -> list[Tensor]:
        comptime(no_guards)
        outs = regroup(kts, groups)
        comptime(guards_again)
        return outs

    model = Holding("regroup", "before: names")
    model.inner = regroup_without_guards
    values = values_of(make_kts())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert same(compiled(*values), model(*values))
    model.names[1].reverse()
    assert same(compiled(*values), model(*values))


CHANGES: dict[str, Callable[[KeyedTensor, list[str], list[list[str]]], None]] = {
    "through the KeyedTensor": lambda kt, names, groups: kt._keys.reverse(),
    "through another name": lambda kt, names, groups: names.reverse(),
    "another list": lambda kt, names, groups: setattr(kt, "_keys", names[::-1]),
    "the groups": lambda kt, names, groups: groups[0].reverse(),
    "a new group": lambda kt, names, groups: groups.__setitem__(0, ["b", "a", "b"]),
}


@pytest.mark.parametrize("callee", ["module", "regroup"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_lists_changed_in_the_code_that_is_compiled(
    change: str, way: str, callee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    inner = CALLEES[callee]()

    def changing(kt: KeyedTensor, names: list[str], groups: list[list[str]]) -> list[Tensor]:
        before = inner([kt], groups)
        CHANGES[change](kt, names, groups)
        return [*before, *inner([kt], groups)]

    def arguments() -> Any:
        names = ["a", "b"]
        return KeyedTensor(names, [3, 3], values), names, [["a", "b"], ["b"]]

    values = torch.randn(2, 6)
    compiled = torch.compile(changing, fullgraph=True, backend="eager")
    for _ in range(2):
        assert same(compiled(*arguments()), changing(*arguments()))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_a_group_changed_under_another_name(
    way: str, callee: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    inner = CALLEES[callee]()

    def changing(kts: Kts, group: list[str], groups: list[list[str]]) -> list[Tensor]:
        group.reverse()
        return inner(kts, groups)

    kts = make_kts([(["a", "b"], [4, 4]), LAYOUT[1]])
    compiled = torch.compile(changing, fullgraph=True, backend="eager")
    for _ in range(2):
        groups = [list(group) for group in GROUPS]
        expected = [list(group) for group in GROUPS]
        expected[place].reverse()
        assert same(compiled(kts, groups[place], groups), reference(kts, expected))
        assert groups == expected


def assert_same_gradients(outs: list[Tensor], expected: list[Tensor], values: list[Tensor]) -> None:
    weights = [torch.randn_like(out) for out in outs]
    got = torch.autograd.grad(outs, values, weights)
    exact = torch.autograd.grad(expected, values, weights)
    for a, b in zip(got, exact):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # sums of up to six terms, in another order


class Pair(nn.Module):
    """Two modules with plans of their own, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = module(GROUPS), module([["d"], ["b", "a"]])

    def forward(self, kts: Kts) -> list[Tensor]:
        return [*self.first(kts).values(), *self.second(kts).values(), *self.first(kts[::-1]).values()]


def pair(kts: Kts) -> list[Tensor]:
    return [*regroup(kts, GROUPS), *regroup(kts, [["d"], ["b", "a"]]), *regroup(kts[::-1], GROUPS)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("call", [Pair, lambda: pair], ids=["modules", "functions"])
def test_several_plans_in_one_graph(call: Callable[[], Any], backend: str) -> None:
    compiled = torch.compile(call(), fullgraph=True, backend=backend)
    for batch in (3, 5):
        kts = make_kts(batch=batch, grad=True)
        expected = [
            *reference(kts, GROUPS),
            *reference(kts, [["d"], ["b", "a"]]),
            *reference(kts, GROUPS),
        ]
        outs = compiled(kts)
        assert same(outs, expected)
        assert_same_gradients(outs, expected, values_of(kts))


@pytest.mark.parametrize("strict", [False, True])
def test_several_plans_in_one_exported_program(strict: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, first: Tensor, second: Tensor) -> Any:
            kts = [KeyedTensor(list(k), list(w), v) for (k, w), v in zip(LAYOUT, (first, second))]
            return [*self.pair(kts), *pair(kts)]

    kts = make_kts()
    program = torch.export.export(Model(), tuple(values_of(kts)), strict=strict)
    assert same(program.module()(*values_of(kts)), [*Pair()(kts), *pair(kts)])


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_disagree_on_key_dim(way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager")
    kts = make_kts([(["a", "b"], [3, 5]), (["c", "d"], [4, 4])], 8)
    kts[1]._key_dim = -1
    assert same(call(kts, GROUPS), reference(kts, GROUPS))
    kts[1]._key_dim = 0
    with pytest.raises(Exception, match="key_dim 0"):
        call(kts, GROUPS)


class Renamed(KeyedTensor):
    """Answers otherwise than its fields say."""

    def keys(self) -> list[str]:
        return [{"a": "b", "b": "a"}.get(key, key) for key in self._keys]


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_subclasses_are_asked(way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager")
    plain = make_kts([(["a", "b"], [4, 4]), LAYOUT[1]])
    kts = [Renamed(plain[0].keys(), plain[0].length_per_key(), plain[0].values()), plain[1]]
    assert same(call(kts, GROUPS), reference(kts, GROUPS))
    assert not same(reference(kts, GROUPS), reference(plain, GROUPS))


@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_unknown_keys_are_named(way: str, callee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    call = torch.compile(CALLEES[callee](), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="key 'nowhere', named by groups"):
        call(make_kts(), [["a"], ["nowhere"]])


WRONG: dict[str, tuple[list[list[str]], type[Exception], str]] = {
    "unknown": ([["a"], ["nowhere"]], KeyError, "key 'nowhere', named by groups"),
    "ambiguous": ([["a"], ["twice"]], ValueError, "appears more than once"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("callee", CALLEES)
@pytest.mark.parametrize("way", WAYS)
def test_exceptions_are_those_of_eager_calls(
    way: str, callee: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    groups, exception, message = WRONG[wrong]
    inner = CALLEES[callee]()
    kts = make_kts([(["a", "twice"], [3, 5]), (["b", "twice"], [2, 4])])

    def catching(kts: Kts, groups: list[list[str]]) -> list[Tensor]:
        try:
            return inner(kts, groups)
        except exception:
            return inner(kts, [["b"], ["a"]])

    with pytest.raises(exception, match=message):
        torch.compile(inner, backend="eager")(kts, groups)
    caught = torch.compile(catching, fullgraph=True, backend="eager")
    assert same(caught(kts, groups), reference([kts[0], kts[1]], [["b"], ["a"]]))
    assert same(caught(kts, [["a"], ["b"]]), reference(kts, [["a"], ["b"]]))


@pytest.mark.parametrize("way", ["in one step", "without the compiler's hook"])
def test_many_compilations(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WAYS[way](monkeypatch)
    kts = make_kts()

    def call() -> list[Tensor]:
        return [part for group in (["a"], ["b"], ["c"], ["d"]) for part in regroup(kts, [group, ["a"]])]

    expected = [part for group in (["a"], ["b"], ["c"], ["d"]) for part in reference(kts, [group, ["a"]])]
    for _ in range(18):
        torch._dynamo.reset()
        assert same(torch.compile(call, fullgraph=True, backend="eager")(), expected)
    assert len(_compiled._numbered) <= 64


# --- regions that are compiled once for all their calls ---------------------------------------------


in_region: Any = torch.compiler.nested_compile_region


@in_region
def region(part: nn.Module, *values: Tensor) -> Any:
    return part(*values)


def in_tuple(outs: list[Tensor]) -> Any:
    return tuple(outs)


def in_dict(outs: list[Tensor]) -> Any:
    return dict(enumerate(outs))


def first(outs: list[Tensor]) -> Any:
    return outs[0]


def by_module(groups: list[list[str]]) -> Callable[[Kts], list[Tensor]]:
    regroup_as_dict = module(groups)
    return lambda kts: list(regroup_as_dict(kts).values())


def by_plan(groups: list[list[str]]) -> Callable[[Kts], list[Tensor]]:
    plan = RegroupPlan.build(LAYOUT, groups)
    return lambda kts: regroup_values(values_of(kts), plan)


class Part(nn.Module):
    def __init__(self, inner: Callable[[Kts], list[Tensor]], result: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.inner, self.result = inner, result

    def forward(self, *values: Tensor) -> Any:
        kts = [KeyedTensor(list(k), list(w), v) for (k, w), v in zip(LAYOUT, values)]
        return self.result(self.inner(kts))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("result", [in_tuple, in_dict, first])
@pytest.mark.parametrize("way", [by_module, by_plan, lambda groups: lambda kts: regroup(kts, groups)])
def test_regions(
    way: Callable[[list[list[str]]], Any], result: Callable[[list[Tensor]], Any], backend: str
) -> None:
    """Two plans in turn, one of them twice: code is used again for the same groups only."""
    order = [GROUPS, [["d"], ["b", "a"]], GROUPS]
    parts = nn.ModuleList([Part(way(groups), result) for groups in order])

    def call(*values: Tensor) -> list[Any]:
        return [region(part, *values) for part in parts]

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for batch in (3, 5):
        kts = make_kts(batch=batch, grad=True)
        values = values_of(kts)
        expected = tree_leaves([result(reference(kts, groups)) for groups in order])
        outs = tree_leaves(compiled(*values))
        assert same(outs, expected)
        assert_same_gradients(outs, expected, values)
