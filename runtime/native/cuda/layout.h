// layout.h: how a row lies in device memory. A block's fields are taken apart: the first field of all blocks
// of the row, then the second of all, so that a warp reads 16 aligned bytes a lane, one lane after the other.
#pragma once

#include "kernels/kernels.h"

#include <cstdint>

namespace pi_cuda {

struct Field {
    uint8_t offset; // in the file's block
    uint8_t bytes;
};

struct Layout {
    uint32_t block_elements;
    uint32_t block_bytes;
    uint32_t n_fields; // 0: as in the file
    Field fields[4];
};

constexpr Layout layouts[PI_KT_COUNT] = {
    /* F32    */ {1, 4, 0, {}},
    /* F16    */ {1, 2, 0, {}},
    /* BF16   */ {1, 2, 0, {}},
    /* Q8_0   */ {32, 34, 2, {{2, 32}, {0, 2}}},
    /* Q4_0   */ {32, 18, 2, {{2, 16}, {0, 2}}},
    /* Q4_1   */ {32, 20, 2, {{4, 16}, {0, 4}}},
    /* Q5_0   */ {32, 22, 3, {{6, 16}, {2, 4}, {0, 2}}},
    /* Q5_1   */ {32, 24, 3, {{8, 16}, {4, 4}, {0, 4}}},
    /* Q2_K   */ {256, 84, 3, {{16, 64}, {0, 16}, {80, 4}}},
    /* Q3_K   */ {256, 110, 4, {{32, 64}, {0, 32}, {96, 12}, {108, 2}}},
    /* Q4_K   */ {256, 144, 2, {{16, 128}, {0, 16}}},
    /* Q5_K   */ {256, 176, 3, {{48, 128}, {16, 32}, {0, 16}}},
    /* Q6_K   */ {256, 210, 4, {{0, 128}, {128, 64}, {192, 16}, {208, 2}}},
    /* IQ4_NL */ {32, 18, 2, {{2, 16}, {0, 2}}},
    /* MXFP4  */ {32, 17, 2, {{1, 16}, {0, 1}}},
    /* NVFP4  */ {64, 36, 2, {{4, 32}, {0, 4}}},
};

static_assert(sizeof(pi_block_q2_k) == 84 && sizeof(pi_block_q3_k) == 110 && sizeof(pi_block_q6_k) == 210);
static_assert(sizeof(pi_block_q4_k) == 144 && sizeof(pi_block_q5_k) == 176 && sizeof(pi_block_nvfp4) == 36);

constexpr uint32_t row_alignment = 16;

// Bytes from one row to the next, 0 for a length that the kernels do not take.
inline uint64_t stride_of(uint32_t kernel_type, uint32_t n_cols) {
    if (kernel_type >= PI_KT_COUNT || n_cols == 0 || n_cols % 32 != 0)
        return 0;
    const Layout &layout = layouts[kernel_type];
    if (n_cols % layout.block_elements != 0)
        return 0;
    const uint64_t n_bytes = uint64_t{n_cols} / layout.block_elements * layout.block_bytes;
    return (n_bytes + row_alignment - 1) / row_alignment * row_alignment;
}

// Field f of block b of a row is at n_blocks * field_begin<type, f> + b * bytes.
template <int kernel_type, int f>
constexpr uint32_t field_begin = field_begin<kernel_type, f - 1> + layouts[kernel_type].fields[f - 1].bytes;
template <int kernel_type>
constexpr uint32_t field_begin<kernel_type, 0> = 0;

} // namespace pi_cuda
