// stream.cpp: weights and buffers on the device.
#include "stream.h"

#include <algorithm>

namespace pi {

namespace {

constexpr uint64_t graph_bytes = 32u << 20; // of the budget, for graphs
constexpr uint64_t tile_bytes = 56u << 20;  // what the device library dequantises, or takes apart, at a time

// The scratch that steps of up to n tokens need; runtime/plan/gpu.py counts the same.
void reserve_scratch(const GpuDevice &device, const ModelConfig &config, uint64_t n) {
    const auto processors = static_cast<uint64_t>(device.info().n_processors);
    const uint64_t spans = (4 * processors + config.n_kv_heads - 1) / config.n_kv_heads;
    const uint64_t attention = (n + spans) * config.n_heads * (config.head_dim + 2);
    const uint64_t sums = (2 * processors + config.n_embd / 1024 + 1) * 1024;
    const uint64_t top_lists = (config.n_vocab + PI_GPU_TOP_LOGITS - 1) / PI_GPU_TOP_LOGITS;
    const uint64_t tops = std::min<uint64_t>(n, PI_GPU_TOP_ROWS) * top_lists * 2 * (PI_MAX_TOP + 1);
    const uint64_t longest = std::max({config.n_ff, config.n_embd, config.n_embd_q()}) + uint64_t{32};
    device.call(&pi_gpu_api::reserve, std::max({attention, sums, tops}) * sizeof(float),
                n * (2 * longest + sizeof(float)), tile_bytes + uint64_t{64} * longest, graph_bytes);
}

} // namespace

GpuStream::GpuStream(const pi_model &model, const Plan &plan, const GpuPlacement &placement)
    : device(0, plan.vram_budget_bytes), name(device.info().name), max_tokens(plan.max_batch_tokens),
      context_pages((plan.n_context + PI_PAGE - 1) / PI_PAGE), file_(model.mapping) {
    const ModelConfig &config = model.config;
    const bool predictors = plan.ffn_mode(1) == PI_FFN_PREDICTED;
    reserve_scratch(device, config, max_tokens);
    for (uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const LayerPlacement &placed = placement.layers[layer];
        const bool predicted = predictors && (placed.kind == LayerKind::split || !plan.predict_split_only);
        if (placed.on_device())
            put_layer(model.weights.layers[layer], placed, config, predicted);
    }
    if (placement.embedding)
        put(model.weights.embedding);
    if (placement.head) {
        put(model.weights.head);
        put(model.weights.output_norm, config.n_embd);
    }
    make_buffers(config, model, plan);
    if (placement.any_split())
        hand_over = std::make_unique<HandOver>(*this, config, placement, plan);
    if (hand_over != nullptr && plan.stream_tokens != 0)
        cold_weights = std::make_unique<ColdWeights>(*this, model, placement, plan);
    device.call(&pi_gpu_api::synchronize);                  // failures of the uploads belong here
    file_.drop(file_.bytes().data(), file_.bytes().size()); // what reading brought in around them
}

void GpuStream::put_layer(const LayerWeights &layer, const LayerPlacement &placed, const ModelConfig &config,
                          bool predictors) {
    for (const Matrix *matrix : {&layer.q, &layer.k, &layer.v, &layer.attn_output})
        put(*matrix);
    put_neurons(layer, config, 0, placed.n_hot, PI_PLACE_GPU);
    put_neurons(layer, config, placed.n_hot, placed.n_pull, PI_PLACE_PULL);
    if (predictors) {
        put_predictor(layer.predictor_fc1, layer.predictor_fc2);
    }
    put(layer.attn_norm, config.n_embd);
    put(layer.ffn_norm, config.n_embd);
    put(layer.q_bias, config.n_embd_q());
    put(layer.k_bias, config.n_embd_kv());
    put(layer.v_bias, config.n_embd_kv());
    put(layer.attn_output_bias, config.n_embd);
}

void GpuStream::put_neurons(const LayerWeights &layer, const ModelConfig &config, uint32_t begin,
                            uint32_t end, uint32_t place) {
    if (begin == end)
        return;
    put(layer.gate, begin, end, place);
    put(layer.up, begin, end, place);
    if (config.sparse_layout) {
        put(layer.down_t, begin, end, place);
    } else if (begin == 0 && end == config.n_ff) {
        put(layer.down);
    } else {
        put_columns(layer.down, begin, end, place);
    }
}

// Kernels take multiples of 32 columns: the rank is filled up with units that are always 0.
void GpuStream::put_predictor(const Matrix &fc1, const Matrix &fc2) {
    const uint64_t rank = fc1.n_rows, padded = padded_rank(rank);
    if (rank == padded) {
        put(fc1);
        return put(fc2);
    }
    const pi_gpu_rows units = place_for(fc1, padded, PI_PLACE_GPU);
    pi_gpu_rows part = units;
    part.n_rows = static_cast<uint32_t>(rank);
    device.call(&pi_gpu_api::upload_rows, fc1.rows().base, fc1.row_bytes, &part);
    uint8_t *rest = static_cast<uint8_t *>(const_cast<void *>(units.data)) + rank * units.row_stride;
    device.call(&pi_gpu_api::zero, static_cast<void *>(rest), (padded - rank) * units.row_stride);
    matrices_[static_cast<const uint8_t *>(fc1.rows().base)].push_back({0, padded, units});

    Matrix wide = fc2;
    wide.n_cols = padded;
    put_resized(fc2, fc2.row_bytes, place_for(wide, fc2.n_rows, PI_PLACE_GPU));
    file_.drop(static_cast<const uint8_t *>(fc1.rows().base), fc1.n_bytes());
    file_.drop(static_cast<const uint8_t *>(fc2.rows().base), fc2.n_bytes());
}

void GpuStream::put(const float *values, uint64_t n) {
    if (values != nullptr && !vectors_.contains(values))
        vectors_[values] = device.copy_of(values, n);
}

pi_gpu_rows rows_on(const GpuDevice &device, const Matrix &matrix, uint64_t n_rows) {
    pi_gpu_rows rows{};
    rows.kernel_type = static_cast<uint32_t>(matrix.type->kernel_index);
    rows.n_cols = static_cast<uint32_t>(matrix.n_cols);
    rows.n_rows = static_cast<uint32_t>(n_rows);
    rows.row_stride = device.api().row_stride(rows.kernel_type, rows.n_cols);
    if (rows.row_stride == 0)
        throw Error(PI_FAILURE,
                    "the device has no kernels for rows of " + std::to_string(matrix.n_cols) +
                        " elements of " + matrix.type->name,
                    "use --vram-budget 0");
    return rows;
}

// Memory for n rows as the device reads them.
pi_gpu_rows GpuStream::place_for(const Matrix &matrix, uint64_t n_rows, uint32_t place) {
    pi_gpu_rows rows = rows_on(device, matrix, n_rows);
    if (place == PI_PLACE_GPU) {
        rows.data = device.allocate<uint8_t>(rows.row_stride * n_rows);
        return rows;
    }
    rows.data = pinned.allocate(rows.row_stride * n_rows).device;
    rows.on_host = 1;
    return rows;
}

void GpuStream::put(const Matrix &matrix, uint64_t begin, uint64_t end, uint32_t place) {
    std::vector<Part> &parts = matrices_[static_cast<const uint8_t *>(matrix.rows().base)];
    if (!parts.empty() && parts.back().end >= end)
        return; // a tied head
    const auto *host = static_cast<const uint8_t *>(matrix.rows(begin, end).base);
    const pi_gpu_rows rows = place_for(matrix, end - begin, place);
    device.call(&pi_gpu_api::upload_rows, static_cast<const void *>(host), matrix.row_bytes, &rows);
    file_.drop(host, (end - begin) * matrix.row_bytes);
    parts.push_back({begin, end, rows});
}

void GpuStream::put_columns(const Matrix &matrix, uint64_t begin, uint64_t end, uint32_t place) {
    const Matrix columns = matrix.columns(begin, end);
    put_resized(columns, matrix.type->row_bytes(end - begin), place_for(columns, columns.n_rows, place));
    file_.drop(static_cast<const uint8_t *>(matrix.rows().base), matrix.n_bytes());
}

// Rows of another length than the file's, through a copy of some at a time: the first n_bytes of each, then
// zeros.
void GpuStream::put_resized(const Matrix &matrix, uint64_t n_bytes, const pi_gpu_rows &rows) {
    const auto *host = static_cast<const uint8_t *>(matrix.rows().base);
    const uint64_t row_bytes = matrix.type->row_bytes(rows.n_cols), each = tile_bytes / row_bytes + 1;
    std::vector<uint8_t> copy(std::min(each, matrix.n_rows) * row_bytes);
    for (uint64_t first = 0; first < matrix.n_rows; first += each) {
        pi_gpu_rows part = rows;
        part.data = static_cast<const uint8_t *>(rows.data) + first * rows.row_stride;
        part.n_rows = static_cast<uint32_t>(std::min(each, matrix.n_rows - first));
        for (uint64_t i = 0; i < part.n_rows; ++i)
            std::copy_n(host + (first + i) * matrix.row_bytes, n_bytes, copy.data() + i * row_bytes);
        device.call(&pi_gpu_api::upload_rows, static_cast<const void *>(copy.data()), row_bytes, &part);
    }
    matrices_[host].push_back({0, matrix.n_rows, rows});
}

pi_gpu_rows GpuStream::rows(const Matrix &matrix, uint64_t begin, uint64_t end) const {
    const auto found = matrices_.find(static_cast<const uint8_t *>(matrix.rows().base));
    for (const Part &part : found == matrices_.end() ? std::vector<Part>{} : found->second) {
        if (begin < part.begin || end > part.end)
            continue;
        pi_gpu_rows rows = part.rows;
        rows.data = static_cast<const uint8_t *>(rows.data) + (begin - part.begin) * rows.row_stride;
        rows.n_rows = static_cast<uint32_t>(end - begin);
        return rows;
    }
    throw Error(PI_FAILURE, "a matrix is not on the device");
}

NeuronRows GpuStream::neurons(const LayerWeights &layer, const ModelConfig &config, uint32_t begin,
                              uint32_t end) const {
    return {rows(layer.gate, begin, end), rows(layer.up, begin, end),
            config.sparse_layout ? rows(layer.down_t, begin, end) : rows(layer.down.columns(begin, end))};
}

const uint32_t *GpuStream::indices(const void *host, uint32_t n) {
    device.call(&pi_gpu_api::upload, host, n * sizeof(uint32_t), static_cast<void *>(index_buffer));
    return index_buffer;
}

void GpuStream::make_buffers(const ModelConfig &config, const pi_model &model, const Plan &plan) {
    const uint64_t n = max_tokens, n_ff = config.n_ff;
    ffn.gate = device.allocate<float>(n * n_ff);
    ffn.up = device.allocate<float>(n * n_ff);
    uint64_t rank = 0;
    for (const LayerWeights &layer : model.weights.layers)
        rank = std::max(rank, padded_rank(layer.predictor_fc1.n_rows));
    const uint64_t together = std::min<uint64_t>(n, GpuFfnBuffers::predicted_together);
    ffn.hidden = device.allocate<float>(together * rank);
    ffn.logits = device.allocate<float>(together * n_ff);
    ffn.mask = device.allocate<uint32_t>(n * ((n_ff + 31) / 32));
    ffn.words = device.allocate<uint64_t>(n * ((n_ff + 63) / 64));
    ffn.counts = device.allocate<uint64_t>(2);
    device.call(&pi_gpu_api::zero, static_cast<void *>(ffn.counts), uint64_t{2} * sizeof(uint64_t));
    row_results = device.allocate<float>(n);
    index_buffer = device.allocate<uint32_t>(n);
    const uint64_t sequences = std::min<uint64_t>(n, plan.n_sequences);
    // Places of tokens, tiles, tokens, wanted rows, angles, block table.
    step_buffers.capacity = n * (4 + 2 + 2 + config.n_rot) + sequences * context_pages;
    step_buffers.words = device.allocate<uint32_t>(step_buffers.capacity);
    step_buffers.tree_capacity = n * ((n + 63) / 64);
    step_buffers.tree = device.allocate<uint64_t>(step_buffers.tree_capacity);
}

GpuPages::GpuPages(const GpuDevice &device, const KvShape &shape, const std::vector<uint8_t> &layers)
    : device_(device), page_bytes_(shape.layer_page_bytes()), layers_(shape.n_layers) {
    for (uint32_t layer = 0; layer < shape.n_layers; ++layer) {
        if (layers[layer] != 0)
            layers_[layer] = device.allocate<uint8_t>(page_bytes_ * shape.n_pages);
    }
}

void GpuPages::clear(uint32_t page) {
    for (uint8_t *layer : layers_) {
        if (layer != nullptr)
            device_.call(&pi_gpu_api::zero, static_cast<void *>(at(layer, page)), page_bytes_);
    }
}

void GpuPages::copy(uint32_t from, uint32_t to) {
    for (uint8_t *layer : layers_) {
        if (layer != nullptr)
            device_.call(&pi_gpu_api::copy, static_cast<const void *>(at(layer, from)), page_bytes_,
                         static_cast<void *>(at(layer, to)));
    }
}

void GpuPages::read(uint32_t layer, uint32_t page, uint8_t *out) const {
    device_.call(&pi_gpu_api::download, static_cast<const void *>(at(layers_[layer], page)), page_bytes_,
                 static_cast<void *>(out));
    device_.call(&pi_gpu_api::synchronize);
}

void GpuPages::write(uint32_t layer, uint32_t page, const uint8_t *data) {
    device_.call(&pi_gpu_api::upload, static_cast<const void *>(data), page_bytes_,
                 static_cast<void *>(at(layers_[layer], page)));
}

} // namespace pi
