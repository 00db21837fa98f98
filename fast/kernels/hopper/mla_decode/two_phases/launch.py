"""Launcher of a decode in two phases: allocate the buffers, and launch the kernel that runs both phases.

A score block is a pair of tiles (64 keys each) of one request, for one row block of 64 rows. The program that computes
a score block writes several words of 32 bits to global memory, for which other programs wait: for each row and tile a
word with the largest score, and at the end one word as a flag. Before this kernel, a small kernel sets all words to
NOT_WRITTEN.
"""

from __future__ import annotations

import torch

from .....backends import launch
from ....integers import cdiv
from ...common.dependent_launch import LAUNCH
from ...common.descriptors import descriptor
from ...common.own_length import TILE
from ...common.records import Constants
from ..arguments import BatchSizes, LaunchInputs, LaunchOutputs, Numbers, RowSizes
from ..main_loops.tile_scores import ROWS
from .column_blocks import COLUMN_BLOCKS
from .kernel import CLEARED, _clear_kernel, _two_phases_kernel
from .score_blocks import ROW_VALUES, SCORE_WORDS


def launch_two_phases(
    inputs: LaunchInputs,
    outputs: LaunchOutputs,
    sizes: BatchSizes,
    row_sizes: RowSizes,
    numbers: Numbers,
    constants: Constants,
    programs: int,
    pairs: int,
    splits_bound: int,
) -> None:
    """Launch the two phases as one cooperative kernel, in which all programs run at the same time.

    A program of this kernel that needs a result of another program waits until the word of the result is no longer
    NOT_WRITTEN.

    Args:
        inputs: queries, descriptors of the cache, and the tensors that describe the batch.
        outputs: outputs and partial outputs.
        sizes: sizes of the batch.
        row_sizes: numbers of rows and partial outputs.
        numbers: split rule, softmax scale and strides.
        constants: compile-time constants of the kernel.
        programs: number of programs: at least one for each score block, and at most one for each multiprocessor.
        pairs: upper bound of the pairs of tiles of a request.
        splits_bound: upper bound of the splits of a request.
    """
    latent_tma, device = inputs.latent_tma, outputs.out.device
    score_blocks = sizes.requests * pairs * row_sizes.row_blocks
    words = torch.empty(score_blocks * (SCORE_WORDS.value + 1), dtype=torch.int32, device=device)
    row_values = torch.empty(score_blocks * ROW_VALUES.value, dtype=torch.float32, device=device)
    box = [2 * ROWS.value, TILE.value]  # probabilities of a score block: 64 rows of each of its two tiles
    probabilities = torch.empty(score_blocks * box[0], box[1], dtype=latent_tma.base.dtype, device=device)
    probability_pairs = descriptor(
        probabilities.data_ptr(), probabilities.dtype, tuple(probabilities.shape), probabilities.stride(), tuple(box),
        128,
    )  # fmt: skip
    value_tma = descriptor(
        *latent_tma.base, tuple(latent_tma.shape), tuple(latent_tma.strides),
        (1, latent_tma.block_shape[1], constants.LATENT // COLUMN_BLOCKS.value), 128,
    )  # fmt: skip
    launch(_clear_kernel, (cdiv(words.numel(), CLEARED.value),), words, words.numel(), **LAUNCH)
    launch(
        _two_phases_kernel, (programs,),
        *inputs, outputs, value_tma, probability_pairs, words, row_values, probabilities, *sizes, *row_sizes, pairs,
        splits_bound, *numbers, c=constants, **LAUNCH, launch_cooperative_grid=True,
    )  # fmt: skip
