"""Regroup two KeyedTensors with torchrec_kt.KTRegroupAsDict, forward and backward.

Run with torchrec_kt installed: ``python examples/quickstart.py``.
"""

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_kt import KTRegroupAsDict

# Pooled embeddings of a batch of 3: the user side is 4 wide a key, the item side 6.
user = torch.randn(3, 8, requires_grad=True)
item = torch.randn(3, 12, requires_grad=True)
user_kt = KeyedTensor(["user_id", "zip_code"], [4, 4], user)
item_kt = KeyedTensor(["item_id", "genres"], [6, 6], item)

# "item_id" goes into two groups, "zip_code" into none.
groups = {"tower": ["user_id", "item_id"], "item": ["item_id", "genres"]}
regroup = KTRegroupAsDict(list(groups.values()), list(groups))
out = regroup([user_kt, item_kt])
for name, tensor in out.items():
    print(f"{name}: {groups[name]} -> {tuple(tensor.shape)}")

torch.stack([tensor.sum() for tensor in out.values()]).sum().backward()
assert user.grad is not None
assert item.grad is not None
print("gradient of item_id, used twice:", item.grad[:, :6].unique().tolist())
print("gradient of zip_code, unused:", user.grad[:, 4:].unique().tolist())

# The same by hand: slice each key's columns and concatenate them.
by_key = {**user_kt.to_dict(), **item_kt.to_dict()}
for name, keys in groups.items():
    assert torch.equal(out[name], torch.cat([by_key[key] for key in keys], dim=1))
print("equal to slicing by key and torch.cat")
