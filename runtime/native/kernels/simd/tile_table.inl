// tile_table.inl: a table with the kernels on tiles.

#pragma once

namespace {

// A table whose prompts go through the tiles: int8 products would have to leave them after every block of 32,
// for its scale.
constexpr pi_kernels with_tiles(pi_kernels table) {
    table.round_panel = round_panel;
    table.round_weights = round_weights;
    table.gemm_rounded = gemm_rounded;
    table.attend_rounded = attend_tiles;
    return table;
}

} // namespace
