// stream.h: the CPU backend: a thread pool, one kernel table and scratch that grows to the largest step.
// Operations are done when they return.
#pragma once

#include "../ops.h"
#include "../pool.h"
#include "kernels/kernels.h"

namespace pi {

// Float scratch, aligned for vectors, that only grows.
class Scratch {
  public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;

    // At least n floats; contents are not kept. Throws std::bad_alloc.
    float *floats(uint64_t n);
    template <typename T>
    T *as(uint64_t n) {
        static_assert(alignof(T) <= 64);
        return reinterpret_cast<T *>(floats((n * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
    }

  private:
    float *data_ = nullptr;
    uint64_t capacity_ = 0;
};

// Activations as int8 blocks, one token after the other.
struct QuantisedInput {
    Scratch q, d, s, h;
    Scratch rest; // [n_cols]
    std::vector<pi_q8_vector> tokens;
};

struct CpuStream final : Stream {
    CpuStream(uint32_t n_threads, const pi_kernels &table, bool int8)
        : pool(n_threads), kernels(table), int8_activations(int8) {}

    Pool pool;
    const pi_kernels &kernels;
    const RopeAngles *angles = nullptr; // the step's
    std::vector<LayerStamps> all_stamps;
    const bool int8_activations; // against quantised weights, as far as the kernels have it: see uses_int8

    QuantisedInput quantised;
    Scratch panels;   // packed input of a matrix product
    Scratch second;   // results of what rounding left of some tokens
    Scratch tiles;    // [n_threads] weight tile and output tile
    Scratch partials; // attention splits, or FFN groups
    Scratch sums;     // a product that is added to its output
    Scratch heads;    // [n_threads] gathered queries of an attention tile
    Scratch visible;  // [n_threads] what they see of some pages
    Scratch rounded;  // [n_threads] rounded factors of an attention tile
    Scratch gate, up; // [n_tokens, n_ff]
    Scratch fired_index, fired_coef, fired_count;
    Scratch block_starts, ranges, range_fired;
    Scratch predicted, predictor_hidden, predictor_logits;
};

// Steps of up to this many tokens multiply row by row; larger ones as the type of the weights allows.
constexpr uint32_t gemv_tokens = 4;
// Weights that several tokens use one after the other: as many as stay in a core's second-level cache.
constexpr int64_t shared_bytes = 256 * 1024;

// Rows of a chunk to hand to a thread, where n_bytes of weights are to be read in all.
int64_t rows_per_chunk(const CpuStream &stream, int64_t n_bytes, int64_t row_bytes);

// Fills stream.quantised with the tokens of x [n_tokens, n_cols], and behind them with what rounding left of
// the tokens `twice`.
void quantise_input(CpuStream &stream, const float *x, uint32_t n_tokens, uint64_t n_cols,
                    std::span<const uint32_t> twice = {});
// The first positions of a sequence are attention sinks: every later token reads their keys and values, and
// their activations have the largest outliers. Rounding to int8 would spoil them: row by row they are
// multiplied as floats, in products of many tokens what rounding leaves of them is rounded and multiplied
// too.
constexpr uint32_t precise_positions = 4;
// positions null: none is.
inline bool is_precise(const uint32_t *positions, uint32_t token) {
    return positions != nullptr && positions[token] < precise_positions;
}
// Whether a step of n_tokens multiplies the matrix with int8 activations.
bool uses_int8(const CpuStream &stream, const Matrix &matrix, uint32_t n_tokens);

inline const pi_type_kernels &type_kernels(const CpuStream &stream, const Matrix &matrix) {
    return stream.kernels.type[matrix.type->kernel_index];
}

// Whether the tiles of a matrix go through the table's matrix unit, in bfloat16: where int8 would do.
bool rounds_tiles(const CpuStream &stream, const Matrix &matrix);
// Products of one input x [n_tokens, n_cols] through tiles.
void multiply_tiles(CpuStream &stream, std::span<const Product> products, const float *x, uint32_t n_tokens);
// out [n_tokens, n_embd] = h [n_tokens, n_rows of the range] . rows: the product with a transposed matrix.
void matmul_transposed(CpuStream &stream, const Matrix &matrix, uint64_t row_begin, uint64_t row_end,
                       const float *h, uint32_t n_tokens, float *out);

void cpu_matmul(CpuStream &stream, std::span<const Product> products, const float *x,
                const uint32_t *positions, uint32_t n_tokens);
void cpu_attend(CpuStream &stream, const AttentionArgs &args);
void cpu_ffn(CpuStream &stream, const FfnArgs &args);

// A CPU backend on the kernel table that select_kernels(isa) names. int8_activations: against quantised
// weights.
Backend open_cpu_backend(uint32_t n_threads, const char *isa, bool int8_activations);

} // namespace pi
