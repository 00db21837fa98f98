"""Tests of `DirectCalls`: ops that `fast` calls past torch's dispatcher where nothing needs the dispatcher."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fast.backends import DirectCalls

MODULES = ("cache.blocks", "planning.visible_lens", "planning.advance", "mla.padding_tokens", "distributed.merge",
           "distributed.reorg")  # fmt: skip
CALLS = """
import sys
import torch
import fast
from fast.backends.adapters import torch_varlen
from fast.backends.replayed_calls import Recorder
from fast.mla.padding_tokens import zero_padding_tokens
from reference.interfaces import MLAConfig

cache = torch.randn(4, 16, 24)
fast.copy_blocks([cache], torch.tensor([[0, 1]]))
fast.swap_blocks(cache, cache.clone(), torch.tensor([[2, 3]]))
starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
fast.compute_visible_lens(starts, lens, 1)
zero_padding_tokens(torch.randn(2, 3, 4), starts)
with Recorder((cache,)):
    torch.empty(3)
torch_varlen.missing()  # an automatic choice of a backend asks this
layer = dict(num_heads=2, hidden_size=8, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
             v_head_dim=8)
fast.warmup(MLAConfig(**layer), device="cpu", dtype=torch.float32, block_size=16)  # every op of a layer
print([name for name in sys.modules if name == "torch._dynamo"])
"""


class Seen(TorchDispatchMode):
    """Dispatch mode that notes the ops of torch."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    """A subclass of `Tensor`."""


class Calls:
    """`DirectCalls` of an op that adds one to its second argument; it counts how each call went."""

    def __init__(self):
        self.direct = self.dispatched = 0
        self.op = DirectCalls(self._dispatch, self._launch, mutates=(1,))

    def _dispatch(self, *arguments):
        self.dispatched += 1
        return "dispatched"

    def _launch(self, read, written):
        self.direct += 1
        for each in written if isinstance(written, list) else [written]:
            each.detach().add_(1)
        return "direct"


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.mark.parametrize("kind", [torch.Tensor, Parameter])
def test_plain_tensors_go_past_the_dispatcher(kind, calls):
    read = torch.zeros(2) if kind is torch.Tensor else Parameter(torch.zeros(2), requires_grad=False)
    assert calls.op(read, torch.zeros(2)) == "direct"
    assert (calls.direct, calls.dispatched) == (1, 0)


def test_versions_of_written_tensors(calls):
    """Write a tensor, and tensors in a list -> autograd's version of each grows; that of a read tensor does not."""
    read, *written = (torch.zeros(2) for _ in range(4))
    calls.op(read, written[0])
    calls.op(read, written[1:])
    # one version from `add_` on the detached tensor, which shares its version, and one from `DirectCalls`
    assert [each._version for each in (read, *written)] == [0, 2, 2, 2]
    with torch.inference_mode():
        calls.op(read, torch.zeros(2))  # an inference tensor has no version


def test_what_needs_the_dispatcher(calls):
    """Call with each argument and in each mode that needs the dispatcher -> every call goes through it."""
    plain = torch.zeros(2)
    calls.op(torch.zeros(2, requires_grad=True), plain)
    calls.op(plain.as_subclass(Subclass), plain)
    calls.op(plain, [plain, plain.as_subclass(Subclass)])
    calls.op(torch.zeros(2, device="meta"), plain)
    calls.op(torch._neg_view(plain), plain)
    with Seen():
        calls.op(plain, plain)
    torch.vmap(lambda each: (calls.op(each, plain), each)[1])(torch.zeros(3, 2))
    assert (calls.direct, calls.dispatched) == (0, 7)
    with torch.no_grad():
        calls.op(torch.zeros(2, requires_grad=True), plain)
    assert (calls.direct, calls.dispatched) == (1, 7)


def found_calls() -> dict[str, DirectCalls]:
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"fast.{name}")
        found |= {
            each._dispatched._qualified_op_name: each for each in vars(module).values() if type(each) is DirectCalls
        }
    return found


def test_every_op_of_the_module():
    """List the ops -> nine, each with the arguments that its schema says are written."""
    found = found_calls()
    assert len(found) == 9
    for name, each in found.items():
        arguments = each._dispatched.default._schema.arguments
        written = tuple(place for place, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write)
        assert each._mutates == written, name


def test_the_compiler_is_not_imported():
    """Call ops and record a call in a new process -> torch's compiler is not imported."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
