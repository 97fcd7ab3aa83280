// gemm.inl: out[r][t] += sum over k of w[r][k] * x[k][t], tokens along the vector. A tile of gemm_rows x
// gemm_panel sums stays in registers; every sum runs in the order of k whatever the height of the tile.

#pragma once

namespace {

template <int64_t n_rows>
void gemm_rows_of(const float *w, int64_t row_stride, int64_t k_stride, const float *x, int64_t n_k,
                  float *out, int64_t out_stride) {
    constexpr int64_t vectors = gemm_panel / lanes;
    vfloat sums[n_rows][vectors];
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t v = 0; v < vectors; ++v)
            sums[r][v] = vload(out + r * out_stride + v * lanes);
    }
    for (int64_t k = 0; k < n_k; ++k, w += k_stride, x += gemm_panel) {
        vfloat tokens[vectors];
        for (int64_t v = 0; v < vectors; ++v)
            tokens[v] = vload(x + v * lanes);
        for (int64_t r = 0; r < n_rows; ++r) {
            const vfloat weight = vset(w[r * row_stride]);
            for (int64_t v = 0; v < vectors; ++v)
                sums[r][v] = vfma(weight, tokens[v], sums[r][v]);
        }
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t v = 0; v < vectors; ++v)
            vstore(out + r * out_stride + v * lanes, sums[r][v]);
    }
}

// n_rows <= most
template <int64_t most>
void gemm_rest(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, const float *x,
               int64_t n_k, float *out, int64_t out_stride) {
    if (n_rows == most) {
        gemm_rows_of<most>(w, row_stride, k_stride, x, n_k, out, out_stride);
    } else if constexpr (most > 1) {
        gemm_rest<most - 1>(w, row_stride, k_stride, n_rows, x, n_k, out, out_stride);
    }
}

void gemm_tile(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, const float *x,
               int64_t n_k, float *out, int64_t out_stride) {
    for (; n_rows >= gemm_rows;
         n_rows -= gemm_rows, w += gemm_rows * row_stride, out += gemm_rows * out_stride) {
        gemm_rows_of<gemm_rows>(w, row_stride, k_stride, x, n_k, out, out_stride);
    }
    gemm_rest<gemm_rows - 1>(w, row_stride, k_stride, n_rows, x, n_k, out, out_stride);
}

} // namespace
