// cold_weights.h: in steps of many tokens the device computes the CPU's neurons of split layers too: every
// weight is read once for all tokens, so copying it over the bus is faster than the CPU's products. Some
// neurons at a time pass through: threads copy their rows from the mapped file to pinned memory, a copy takes
// them to the device while it computes those before, and there they are taken apart. docs/hybrid.md.
#pragma once

#include "../model.h"
#include "../ops.h"
#include "../plan.h"
#include "library.h"

#include <array>

namespace pi {

struct GpuStream;
struct NeuronRows;

class ColdWeights {
  public:
    // Throws Error: no memory (PI_DOES_NOT_FIT), rows that the device has no kernels for, or pieces that hold
    // no neurons.
    ColdWeights(GpuStream &stream, const pi_model &model, const GpuPlacement &placement, const Plan &plan);
    ColdWeights(const ColdWeights &) = delete;
    ColdWeights &operator=(const ColdWeights &) = delete;

    // Whether a step of so many tokens is computed this way.
    bool serves(uint32_t n_tokens) const { return n_tokens >= from_tokens_; }
    // All neurons of a split layer: args.add_to gets their sum.
    void queue_layer(const FfnArgs &args, uint32_t layer, const OnThreads &on_threads);

  private:
    static constexpr uint32_t n_slots = 2;

    uint32_t end_of_piece(const LayerWeights &layer, const ModelConfig &config, uint32_t begin) const;
    NeuronRows bring(const FfnArgs &args, const OnThreads &on_threads);
    void stamp(uint32_t layer, uint64_t LayerStamps::*moment) const;

    GpuStream &stream_;
    const std::vector<LayerPlacement> layers_;
    const uint32_t from_tokens_;
    const uint64_t piece_bytes_;
    std::array<uint8_t *, n_slots> slots_; // [piece_bytes] of pinned memory, rows as the file has them
    uint32_t next_slot_ = 0;
    uint8_t *raw_;   // device: [piece_bytes] a slot's copy
    uint8_t *apart_; // device: [piece_bytes] rows as the kernels read them
};

} // namespace pi
