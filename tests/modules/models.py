"""Models around a regroup, for tracers and TorchScript."""

# TorchScript reads these annotations, also from traced graphs: no strings, and the typing spellings.
# ruff: noqa: UP006, UP035

from collections.abc import Callable
from typing import Any, Dict, List

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt import regroup, regroup_as_dict


class Parent(torch.nn.Module):
    """Hands its KeyedTensors on."""

    def __init__(self, regroup: torch.nn.Module) -> None:
        super().__init__()
        self.regroup = regroup

    def forward(self, keyed_tensors: List[KeyedTensor]) -> Dict[str, Tensor]:
        return self.regroup(keyed_tensors)


class FromTensors(torch.nn.Module):
    """Makes its KeyedTensors itself, of the default layout."""

    def __init__(self, regroup: Callable[[List[KeyedTensor]], Any]) -> None:
        super().__init__()
        self.regroup = regroup

    def forward(self, first: Tensor, second: Tensor) -> Dict[str, Tensor]:
        return self.regroup([KeyedTensor(["a", "b"], [3, 5], first), KeyedTensor(["c", "d"], [2, 4], second)])


class AsDict(torch.nn.Module):
    """Calls the function inline, with its groups in place, as real models do."""

    def forward(self, keyed_tensors: List[KeyedTensor]) -> Dict[str, Tensor]:
        return regroup_as_dict(keyed_tensors, [["a", "c", "a"], ["d", "b"]], ["x", "y"])


class AsList(torch.nn.Module):
    def forward(self, keyed_tensors: List[KeyedTensor]) -> List[Tensor]:
        return regroup(keyed_tensors, [["a", "c", "a"], ["d", "b"]])


@torch.jit.script
def scripted_as_dict(
    keyed_tensors: List[KeyedTensor], groups: List[List[str]], names: List[str]
) -> Dict[str, Tensor]:
    return regroup_as_dict(keyed_tensors, groups, names)


class OnClass(torch.nn.Module):
    """Calls the static method of KeyedTensor, with groups held in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"x": ["a", "c", "a"], "y": ["d", "b"]}

    def forward(self, keyed_tensors: List[KeyedTensor]) -> List[Tensor]:
        return KeyedTensor.regroup(keyed_tensors, list(self.groups.values()))


class OnClassAsDict(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = {"x": ["a", "c", "a"], "y": ["d", "b"]}

    def forward(self, keyed_tensors: List[KeyedTensor]) -> Dict[str, Tensor]:
        return KeyedTensor.regroup_as_dict(
            keyed_tensors, list(self.groups.values()), list(self.groups.keys())
        )
