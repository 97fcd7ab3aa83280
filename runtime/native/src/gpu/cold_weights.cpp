#include "cold_weights.h"

#include "stream.h"

#include <algorithm>
#include <cstring>

namespace pi {
namespace {

constexpr uint64_t alignment = 256; // of a matrix in a piece

// Some neurons of a matrix: where the file has them, and where in a piece they are.
struct Part {
    const uint8_t *from;
    uint64_t from_stride;
    uint64_t row_bytes; // of the file's row
    pi_gpu_rows rows;   // taken apart, from the piece's begin on
    uint64_t at;        // byte of the piece
    uint64_t end() const {
        return at + (rows.row_stride * rows.n_rows + alignment - 1) / alignment * alignment;
    }
};

// Gate, up and down of the neurons.
using Piece = std::array<Part, 3>;

Part part_of(const GpuDevice &device, const Matrix &matrix, uint64_t begin, uint64_t end, uint64_t at) {
    const pi_rows host = matrix.rows(begin, end);
    return {static_cast<const uint8_t *>(host.base), matrix.row_bytes, matrix.type->row_bytes(matrix.n_cols),
            rows_on(device, matrix, end - begin), at};
}

Piece piece_of(const GpuDevice &device, const LayerWeights &layer, const ModelConfig &config, uint32_t begin,
               uint32_t end) {
    const Part gate = part_of(device, layer.gate, begin, end, 0);
    const Part up = part_of(device, layer.up, begin, end, gate.end());
    if (config.sparse_layout)
        return {gate, up, part_of(device, layer.down_t, begin, end, up.end())};
    const Matrix columns = layer.down.columns(begin, end);
    return {gate, up, part_of(device, columns, 0, columns.n_rows, up.end())};
}

// Rows [n i / n_parts, n (i + 1) / n_parts) of each matrix.
void copy_share(const Piece &piece, uint32_t i, uint32_t n_parts, uint8_t *slot) {
    for (const Part &part : piece) {
        const uint64_t n = part.rows.n_rows, first = n * i / n_parts, last = n * (i + 1) / n_parts;
        uint8_t *to = slot + part.at;
        if (part.from_stride == part.row_bytes) {
            std::memcpy(to + first * part.row_bytes, part.from + first * part.row_bytes,
                        (last - first) * part.row_bytes);
            continue;
        }
        for (uint64_t row = first; row < last; ++row)
            std::memcpy(to + row * part.row_bytes, part.from + row * part.from_stride, part.row_bytes);
    }
}

} // namespace

ColdWeights::ColdWeights(GpuStream &stream, const pi_model &model, const GpuPlacement &placement,
                         const Plan &plan)
    : stream_(stream), layers_(placement.layers), from_tokens_(plan.stream_tokens),
      piece_bytes_(plan.stream_piece_bytes), raw_(stream.device.allocate<uint8_t>(piece_bytes_)),
      apart_(stream.device.allocate<uint8_t>(piece_bytes_)) {
    for (uint8_t *&slot : slots_)
        slot = static_cast<uint8_t *>(stream.pinned.allocate(piece_bytes_).host);
    const ModelConfig &config = model.config;
    // What cannot be streamed is told now, not in the first prompt.
    for (uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const LayerPlacement &placed = layers_[layer];
        if (placed.kind == LayerKind::split && placed.n_pull < config.n_ff)
            end_of_piece(model.weights.layers[layer], config, placed.n_pull);
    }
}

// The most neurons from `begin` on that fit a piece: what is left of the layer, or whole words of masks and
// blocks of a plain down matrix.
uint32_t ColdWeights::end_of_piece(const LayerWeights &layer, const ModelConfig &config,
                                   uint32_t begin) const {
    const auto fits = [&](uint32_t end) {
        return piece_of(stream_.device, layer, config, begin, end)[2].end() <= piece_bytes_;
    };
    if (fits(config.n_ff))
        return config.n_ff;
    const uint32_t step = split_multiple(layer, config);
    uint32_t end = begin;
    while (end + step < config.n_ff && fits(end + step))
        end += step;
    if (end == begin)
        throw_usage("plan: a piece of " + std::to_string(piece_bytes_) + " bytes is too small for " +
                    std::to_string(step) + " neurons");
    return end;
}

NeuronRows ColdWeights::bring(const FfnArgs &args, const OnThreads &on_threads) {
    const GpuDevice &device = stream_.device;
    const Piece piece = piece_of(device, *args.layer, *args.config, args.neuron_begin, args.neuron_end);
    const uint32_t slot = next_slot_;
    next_slot_ = (slot + 1) % n_slots;
    device.call(&pi_gpu_api::await_brought, slot);
    on_threads([&](uint32_t i, uint32_t n_parts) { copy_share(piece, i, n_parts, slots_[slot]); });
    device.call(&pi_gpu_api::bring, slot, static_cast<const void *>(slots_[slot]), piece[2].end(),
                static_cast<void *>(raw_));
    pi_gpu_rows rows[3];
    for (size_t i = 0; i < piece.size(); ++i) {
        rows[i] = piece[i].rows;
        rows[i].data = apart_ + piece[i].at;
        device.call(&pi_gpu_api::take_apart, static_cast<const void *>(raw_ + piece[i].at),
                    piece[i].row_bytes, static_cast<const pi_gpu_rows *>(&rows[i]));
    }
    return {rows[0], rows[1], rows[2]};
}

void ColdWeights::queue_layer(const FfnArgs &args, uint32_t layer, const OnThreads &on_threads) {
    const LayerPlacement &placed = layers_[layer];
    const uint32_t n_ff = args.config->n_ff;
    const pi_gpu_norm norm = *stream_.norm(args.norm);
    stream_.device.call(&pi_gpu_api::rms_norm, args.residual, norm.gain, args.n_tokens, args.config->n_embd,
                        norm.eps, norm.out);
    FfnArgs range = args;
    range.norm = nullptr; // args.normed is there
    const auto resident = [&](uint32_t begin, uint32_t end) {
        range.neuron_begin = begin;
        range.neuron_end = end;
        if (begin < end)
            gpu_ffn_range(stream_, range, stream_.neurons(*args.layer, *args.config, begin, end));
    };
    gpu_predict(stream_, args, 0, {});
    resident(0, placed.n_hot);
    stamp(layer, &LayerStamps::hot);
    resident(placed.n_hot, placed.n_pull);
    for (uint32_t begin = placed.n_pull; begin < n_ff; begin = range.neuron_end) {
        range.neuron_begin = begin;
        range.neuron_end = end_of_piece(*args.layer, *args.config, begin);
        gpu_ffn_range(stream_, range, bring(range, on_threads));
    }
    stamp(layer, &LayerStamps::shares);
    stamp(layer, &LayerStamps::end);
}

void ColdWeights::stamp(uint32_t layer, uint64_t LayerStamps::*moment) const {
    if (stream_.stamps != nullptr)
        stream_.device.call(&pi_gpu_api::stamp, &(stream_.device_stamps[layer].*moment));
}

} // namespace pi
