"""Tests of the expansion into whole keys, for backends whose kernels do not take keys in two parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.attention import varlen
from fast.backends import Backend
from fast.backends.own import CPU
from fast.mla.backend_hooks import BackendHooks
from fast.mla.whole_keys import expand_whole, takes_whole_keys

from ..support.backends import registered
from ..support.factories import (
    DIRECT,
    assert_close64,
    assert_same_bits,
    make_batch,
    make_layer,
    make_weights,
    new_cache,
    positions_of,
)

OP = "flash_attn_varlen"
KEYS: list[torch.Tensor] = []  # keys of each call of `attend_whole`


def attend_whole(q, k, k_pe, *rest, **options):
    """Attend with the CPU kernels, and note the keys, which must be whole."""
    assert k_pe is None and k.shape[2] == q.shape[2]
    KEYS.append(k)
    return backends.kernel("cpu", OP)(q, k, None, *rest, **options)


WHOLE = Backend("whole", 50, "cpu", {OP: replace(CPU.ops[OP], launcher=attend_whole, whole_keys=True)})


@pytest.fixture(autouse=True)
def no_keys():
    KEYS.clear()


@pytest.mark.parametrize("rope", [0, 5])
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_expansion(with_workspace, tokens, rope):
    """Expand latents into whole keys -> the results of `expand_kv`, and the rope part behind the keys of each head."""
    options = {"dtype": torch.float64}
    latents, k_pe = torch.randn(tokens, 2 * 12, **options)[:, :12], torch.randn(tokens, rope, **options)
    w_uk, w_uv = torch.randn(12, 3, 6, **options), torch.randn(12, 3, 10, **options)
    k_nope, v = fast.expand_kv(latents, w_uk, w_uv)
    workspace = torch.full((tokens * 3 * 16 + 128,), torch.nan, **options) if with_workspace else None
    keys, values = expand_whole(latents, k_pe, w_uk, w_uv, workspace)
    assert_close64(keys, torch.cat((k_nope, k_pe[:, None].expand(-1, 3, -1)), -1))
    assert_close64(values, v)
    assert keys.is_contiguous() and keys.shape == (tokens, 3, 6 + rope)
    if with_workspace and tokens:
        first, last = workspace.data_ptr(), workspace.data_ptr() + 8 * workspace.numel()
        assert first <= values.data_ptr() < last


def test_wrong_latents(plain_errors):
    """Expand latents that do not fit the weights -> an error with the name of the argument."""
    with pytest.raises(ValueError, match="^w_uk: expected shape"):
        expand_whole(torch.zeros(2, 5), torch.zeros(2, 4), torch.zeros(6, 3, 8), torch.zeros(6, 3, 8))


def test_which_backends_take_whole_keys():
    """Ask for a name, a mapping and None -> what the named backend declares, and False if no backend is named."""
    with registered(WHOLE):
        assert takes_whole_keys("whole") and takes_whole_keys({OP: "whole"})
        assert not takes_whole_keys("cpu") and not takes_whole_keys(None) and not takes_whole_keys({})
    assert not takes_whole_keys("whole")


@pytest.mark.parametrize("lens", [([5, 3], [5, 3]), ([1, 6, 4], [20, 6, 24])], ids=["prompts", "context"])
def test_a_layer_copies_no_keys(lens, monkeypatch):
    """Run steps with a backend that declares whole keys -> no call joins keys, and the output of the own kernels."""
    monkeypatch.setattr(varlen, "whole_keys", lambda k, k_pe: pytest.fail("joined keys"))
    weights, found = make_weights(DIRECT, torch.float64), {}
    batch = make_batch(*lens)
    hidden = torch.randn(sum(lens[0]), DIRECT.hidden_size, dtype=torch.float64)
    entries = new_cache(batch, DIRECT.head_size, torch.float64)
    with registered(WHOLE):
        for name in ("cpu", "whole"):
            layer = make_layer(fast, DIRECT, weights, torch.float64, backend={OP: name})
            options = dict(workspace_tokens=16, batch_invariant=True, dtype=torch.float64, backend={OP: name})
            plan = fast.MLAMetadataBuilder(DIRECT, 16, 128, 8, **options).build(0, batch.common)
            found[name] = layer(hidden, positions_of(*lens), entries.clone(), plan)
    assert KEYS
    assert_close64(found["whole"], found["cpu"])


def test_an_expansion_of_the_caller_is_joined(monkeypatch):
    """Pass `expand=` to `forward_prefill` -> its keys are joined for the backend; each call has the right keys."""
    torch.manual_seed(0)
    shapes = (4, 2, 12), (4, 10), (4, 4), (10, 2, 8), (10, 2, 6)
    q, latents, k_pe, w_uk, w_uv = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    common = fast.CommonAttentionMetadata.from_lens([4], [4], torch.zeros(1, 1, dtype=torch.int32), 16)
    plan = fast.build_mla_metadata(common, 16, 64, num_programs=0).prefill
    cache = torch.zeros(1, 16, 14, dtype=torch.float64)
    with registered(WHOLE):
        given = q, latents, k_pe, cache, plan, w_uk, w_uv, 0.3
        direct = fast.forward_prefill(*given, backend={OP: "whole"})
        own = fast.forward_prefill(*given, backend={OP: "whole"}, expand=lambda x: fast.expand_kv(x, w_uk, w_uv))
    assert len(KEYS) == 2
    assert_close64(KEYS[0], KEYS[1])
    assert_same_bits(KEYS[1][..., 8:], k_pe[:, None].expand(-1, 2, -1).contiguous())
    assert_close64(direct.out, own.out)


def test_hooks_that_run_attention_themselves():
    """Derive hooks with and without a method of attention -> only results of such a method are checked again."""
    assert not BackendHooks.runs_attention
    assert not type("Plans", (BackendHooks,), {"finalize_metadata": lambda *_: None}).runs_attention
    runs = type("Runs", (BackendHooks,), {"run_prefill_context_chunk": lambda *_: None})
    assert runs.runs_attention and type("Derived", (runs,), {}).runs_attention
