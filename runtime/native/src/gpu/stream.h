// stream.h: the GPU backend: an open device with the weights and KV pages of the layers that a plan puts
// there. Operations are queued; synchronize() waits for them.
#pragma once

#include "backend.h"
#include "cold_weights.h"
#include "graphs.h"
#include "handover.h"
#include "library.h"

#include <map>
#include <optional>

namespace pi {

// KV pages of the device's layers.
class GpuPages final : public KvHome {
  public:
    GpuPages(const GpuDevice &device, const KvShape &shape, const std::vector<uint8_t> &layers);

    void clear(uint32_t page) override;
    void copy(uint32_t from, uint32_t to) override;
    void read(uint32_t layer, uint32_t page, uint8_t *out) const override;
    void write(uint32_t layer, uint32_t page, const uint8_t *data) override;
    uint8_t *layer(uint32_t layer) const { return layers_[layer]; }

  private:
    uint8_t *at(uint8_t *layer, uint32_t page) const { return layer + page * page_bytes_; }

    const GpuDevice &device_;
    uint64_t page_bytes_;
    std::vector<uint8_t *> layers_; // [n_layers] null: elsewhere
};

// What an FFN needs beside its weights, for max_tokens tokens.
struct GpuFfnBuffers {
    static constexpr uint32_t predicted_together = 16; // tokens

    float *gate, *up; // [max_tokens, n_ff]
    float *hidden;    // [predicted_together, rank] of the predictor
    float *logits;    // [predicted_together, n_ff]
    uint32_t *mask;   // [max_tokens, ceil(n_ff / 32)] neurons that it names
    uint64_t *words;  // [max_tokens, words] neurons that fired
    uint64_t *counts; // [2] guessed, active
};

// Rows of that length as the device has them, without their memory. Throws Error where it has no kernels for
// them.
pi_gpu_rows rows_on(const GpuDevice &device, const Matrix &matrix, uint64_t n_rows);

// A step's description on the device: one block of 32-bit words, at fixed places.
struct GpuStepBuffers {
    uint32_t *words;
    uint64_t capacity;
    uint64_t *tree;
    uint64_t tree_capacity;
};

// Units of a predictor on the device.
constexpr uint64_t padded_rank(uint64_t rank) {
    return (rank + 31) / 32 * 32;
}

// Rows of a range of a layer's neurons. down: a neuron a row, or in the plain layout a neuron a column.
struct NeuronRows {
    pi_gpu_rows gate, up, down;
};

struct GpuStream final : Stream {
    GpuStream(const pi_model &model, const Plan &plan, const GpuPlacement &placement);

    // Rows that lie in one place: device memory, or pinned memory of the host.
    pi_gpu_rows rows(const Matrix &matrix, uint64_t begin, uint64_t end) const;
    pi_gpu_rows rows(const Matrix &matrix) const { return rows(matrix, 0, matrix.n_rows); }
    NeuronRows neurons(const LayerWeights &layer, const ModelConfig &config, uint32_t begin,
                       uint32_t end) const;
    const float *vector(const float *host) const { return host == nullptr ? nullptr : vectors_.at(host); }
    // As the device library takes it; none for null.
    std::optional<pi_gpu_norm> norm(const InputNorm *norm) const {
        return norm == nullptr ? std::nullopt
                               : std::optional<pi_gpu_norm>({vector(norm->gain), norm->eps, norm->out});
    }
    // Copies small host arrays to the device's place for them.
    const uint32_t *indices(const void *host, uint32_t n);

    GpuDevice device;
    GpuDevice::PinnedMemory pinned{device}; // pulled weights, and what sides hand over
    GpuGraphs graphs{device};
    std::string name;
    GpuPages *pages = nullptr; // the cache's
    GpuFfnBuffers ffn{};
    GpuStepBuffers step_buffers{};
    pi_gpu_step step{};
    const int32_t *tokens = nullptr;  // [n_tokens]
    const uint32_t *wanted = nullptr; // step.rows
    const float *cosine = nullptr;    // [n_tokens, n_rot / 2]
    const float *sine = nullptr;      // [n_tokens, n_rot / 2]
    const uint32_t *tiles = nullptr;
    uint32_t n_tiles = 0;
    float *row_results = nullptr; // [max_tokens]
    uint32_t *index_buffer = nullptr;
    LayerStamps *host_stamps = nullptr, *device_stamps = nullptr; // [n_layers] once layers were timed
    std::unique_ptr<HandOver> hand_over;                          // where layers are split
    std::unique_ptr<ColdWeights> cold_weights;                    // where large steps stream the CPU's share
    FfnCounts *counts = nullptr;                                  // to be added to when the device is done
    uint32_t max_tokens;
    uint32_t context_pages; // of a sequence

  private:
    struct Part {
        uint64_t begin, end; // rows of the matrix
        pi_gpu_rows rows;
    };

    void put(const Matrix &matrix) { put(matrix, 0, matrix.n_rows, PI_PLACE_GPU); }
    // A range of rows, or of a plain ffn_down's columns, into the memory of a PI_PLACE_*.
    void put(const Matrix &matrix, uint64_t begin, uint64_t end, uint32_t place);
    void put_predictor(const Matrix &fc1, const Matrix &fc2);
    void put_columns(const Matrix &matrix, uint64_t begin, uint64_t end, uint32_t place);
    void put_resized(const Matrix &matrix, uint64_t n_bytes, const pi_gpu_rows &rows);
    pi_gpu_rows place_for(const Matrix &matrix, uint64_t n_rows, uint32_t place);
    void put(const float *values, uint64_t n);
    void put_layer(const LayerWeights &layer, const LayerPlacement &placed, const ModelConfig &config,
                   bool predictors);
    void put_neurons(const LayerWeights &layer, const ModelConfig &config, uint32_t begin, uint32_t end,
                     uint32_t place);
    void make_buffers(const ModelConfig &config, const pi_model &model, const Plan &plan);

    const Mapping &file_;
    std::map<const uint8_t *, std::vector<Part>> matrices_; // by the file's bytes
    std::map<const float *, const float *> vectors_;
};

// Describes the step to the device: tokens and their places, block table, tiles for attention.
void gpu_begin_step(GpuStream &stream, const KvCache &cache, const Step &step, const RopeAngles &angles);
void gpu_ffn(GpuStream &stream, const FfnArgs &args);
// The same in two steps: masks of all neurons for the tokens that are predicted, into stream.ffn.mask, and
// posted from the word first_word on; a range of neurons, args.out = their share.
void gpu_predict(GpuStream &stream, const FfnArgs &args, uint32_t first_word, const pi_gpu_post &post);
void gpu_ffn_range(GpuStream &stream, const FfnArgs &args, const NeuronRows &rows);

} // namespace pi
