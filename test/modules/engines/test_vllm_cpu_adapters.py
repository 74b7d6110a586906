"""Products of rows with their adapters, against one row after the other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_modules.vllm.cpu_adapters import expand_rows, expand_slice_of_rows, shrink_rows

SETS, IN, OUT, RANK = 3, 5, 7, 2


def tensors(is_deep, *shapes):
    generator = torch.Generator().manual_seed(0)
    factors, *rest = (torch.randn(shape, generator=generator) for shape in shapes)
    return [factors[:, None] if is_deep else factors, *rest]


@given(st.lists(st.integers(-1, SETS - 1), min_size=1, max_size=6), st.booleans())
def test_a_row_is_multiplied_with_its_own_adapters_or_with_none(rows, is_deep):
    n, indices = len(rows), torch.tensor(rows)
    down, inputs, output = tensors(is_deep, (SETS, RANK, IN), (n, IN), (n, RANK + 1))
    before = output.clone()
    shrink_rows(inputs, down, output, indices, 0.5)
    for i, at in enumerate(rows):
        wanted = torch.zeros(RANK) if at < 0 else 0.5 * down[at].view(RANK, IN) @ inputs[i]
        torch.testing.assert_close(output[i, :RANK], wanted)
    assert torch.equal(output[:, RANK], before[:, RANK])  # is the caller's

    up, shrunk, output = tensors(is_deep, (SETS, OUT, RANK), (n, RANK), (n, OUT + 2))
    for start, size, adds in ((0, OUT, True), (2, OUT, True), (1, 4, False)):
        before = output.clone()
        if start:
            expand_slice_of_rows(shrunk, up, output, indices, start, size, adds)
        else:
            expand_rows(shrunk, up, output, indices)
        for i, at in enumerate(rows):
            more = torch.zeros(OUT) if at < 0 else up[at].view(OUT, RANK) @ shrunk[i]
            wanted = before[i].clone()
            wanted[start : start + size] *= adds
            wanted[start : start + size] += more[:size]
            torch.testing.assert_close(output[i], wanted)


def test_a_narrower_output_gets_what_it_has_room_for():
    up, shrunk, output = tensors(False, (SETS, OUT, RANK), (2, RANK), (2, 4))
    wanted = output + torch.stack([up[1] @ shrunk[0], up[0] @ shrunk[1]])[:, :4]
    expand_rows(shrunk, up, output, torch.tensor([1, 0]))
    torch.testing.assert_close(output, wanted)


@pytest.mark.vllm
def test_vllm_multiplies_by_them():
    from torchrl_modules.vllm.runtime import import_vllm

    import_vllm()
    import vllm.lora.ops.torch_ops.lora_ops as ops
    import vllm.lora.punica_wrapper.punica_cpu as layers

    for module in (ops, layers):
        assert module.bgmv_shrink is shrink_rows
        assert module.bgmv_expand is expand_rows
        assert module.bgmv_expand_slice is expand_slice_of_rows
