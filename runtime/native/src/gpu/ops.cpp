// ops.cpp: the GPU backend's table, and how a step is described to the device.
#include "stream.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace pi {
namespace {

constexpr uint32_t tile_tokens = 64; // most that a tile of attention takes

float *allocate(GpuStream &stream, uint64_t n_floats) {
    return stream.device.allocate<float>(n_floats);
}

void release(GpuStream &stream, float *data) {
    // A failure here is one that synchronize() has told, or will tell when the device is used again.
    static_cast<void>(stream.device.try_release(data));
}

void upload(GpuStream &stream, const float *host, uint64_t n, float *out) {
    stream.device.call(&pi_gpu_api::upload, host, n * sizeof(float), out);
}

void download(GpuStream &stream, const float *x, uint64_t n, float *host) {
    stream.device.call(&pi_gpu_api::download, x, n * sizeof(float), host);
}

Graph begin_graph(GpuStream &stream, const GraphKey &key, FfnCounts &counts) {
    GraphKey whole = key;
    const auto at = static_cast<uint32_t>(stream.step.table - stream.step_buffers.words);
    whole.insert(whole.end(), {at, stream.step.table_stride, stream.step.most_pages, stream.n_tiles,
                               stream.stamps != nullptr ? 1u : 0u});
    const Graph graph = stream.graphs.begin(whole, counts);
    if (graph == Graph::replayed)
        stream.counts = &counts;
    return graph;
}

bool end_graph(GpuStream &stream, FfnCounts &counts) {
    return stream.graphs.end(counts);
}

void abandon_graph(GpuStream &stream) noexcept {
    stream.graphs.abandon();
}

void gather(GpuStream &stream, const Step &, const float *x, uint32_t begin, uint32_t n_rows, uint32_t n,
            float *out) {
    stream.device.call(&pi_gpu_api::gather, x, stream.wanted + begin, n_rows, n, out);
}

void embed(GpuStream &stream, const Matrix &embedding, const Step &step, float *out) {
    const pi_gpu_rows rows = stream.rows(embedding);
    stream.device.call(&pi_gpu_api::fetch_rows, &rows, stream.tokens, step.n_tokens(), out);
}

void rms_norm(GpuStream &stream, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
              float *out) {
    stream.device.call(&pi_gpu_api::rms_norm, x, stream.vector(gain), n_rows, n, eps, out);
}

void matmul(GpuStream &stream, std::span<const Product> products, const float *x, const InputNorm *norm,
            const uint32_t *, uint32_t n_tokens) {
    pi_gpu_product on_device[PI_GPU_MAX_PRODUCTS];
    if (products.size() > PI_GPU_MAX_PRODUCTS)
        throw Error(PI_FAILURE, "too many products of one input");
    for (size_t i = 0; i < products.size(); ++i) {
        const Product &product = products[i];
        on_device[i] = {stream.rows(*product.matrix, product.row_begin, product.row_end),
                        stream.vector(product.bias), product.out, product.add ? 1u : 0u, 0u};
    }
    const std::optional<pi_gpu_norm> normed = stream.norm(norm);
    stream.device.call(&pi_gpu_api::multiply, static_cast<const pi_gpu_product *>(on_device),
                       static_cast<uint32_t>(products.size()), x, n_tokens, normed ? &*normed : nullptr);
}

pi_gpu_kv kv_of(const GpuStream &stream, const KvCache &cache, uint32_t layer) {
    const KvShape &shape = cache.shape();
    return {stream.pages->layer(layer), shape.layer_page_bytes(), shape.element_bytes == 2 ? 1u : 0u,
            shape.n_kv_heads, shape.head_dim};
}

void place_heads(GpuStream &stream, const AttentionArgs &args, float *q, float *k, const float *v) {
    const pi_gpu_kv kv = kv_of(stream, *args.cache, args.layer);
    const pi_gpu_rope rope = {args.config->n_heads, args.config->n_rot, stream.cosine, stream.sine};
    stream.device.call(&pi_gpu_api::place_heads, &kv, &stream.step, &rope, q, static_cast<const float *>(k),
                       v);
}

void attend(GpuStream &stream, const AttentionArgs &args) {
    pi_gpu_attention work{};
    work.kv = kv_of(stream, *args.cache, args.layer);
    work.step = stream.step;
    work.n_heads = args.config->n_heads;
    work.q = args.q;
    work.out = args.out;
    work.lse = args.lse;
    work.tiles = stream.tiles;
    work.n_tiles = stream.n_tiles;
    stream.device.call(&pi_gpu_api::attend, &work);
}

void top(GpuStream &stream, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top,
         float *out) {
    stream.device.call(&pi_gpu_api::top, logits, n_rows, n_vocab, n_top, reinterpret_cast<uint32_t *>(out));
}

void log_probabilities(GpuStream &stream, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                       const int32_t *targets, float *host) {
    const auto *on_device = reinterpret_cast<const int32_t *>(stream.indices(targets, n_rows));
    stream.device.call(&pi_gpu_api::log_probabilities, logits, n_rows, n_vocab, on_device,
                       stream.row_results);
    download(stream, stream.row_results, n_rows, host);
}

void synchronize(GpuStream &stream) {
    uint64_t counts[2] = {};
    FfnCounts *to = std::exchange(stream.counts, nullptr);
    if (to != nullptr) {
        stream.device.call(&pi_gpu_api::download, stream.ffn.counts, sizeof counts, counts);
        stream.device.call(&pi_gpu_api::zero, stream.ffn.counts, sizeof counts);
    }
    stream.device.call(&pi_gpu_api::synchronize);
    if (to != nullptr) {
        to->guessed += counts[0];
        to->active += counts[1];
    }
}

void time_layers(GpuStream &stream, uint32_t n_layers) {
    if (n_layers > 0 && stream.device_stamps == nullptr) {
        const GpuDevice::Pinned memory = stream.pinned.allocate(n_layers * sizeof(LayerStamps));
        stream.host_stamps = static_cast<LayerStamps *>(memory.host);
        stream.device_stamps = static_cast<LayerStamps *>(memory.device);
    }
    stream.stamps = n_layers == 0 ? nullptr : stream.host_stamps;
    std::fill_n(stream.host_stamps, n_layers, LayerStamps{});
}

void mark(GpuStream &stream, uint32_t layer, Moment moment) {
    if (stream.stamps == nullptr)
        return;
    LayerStamps &stamps = stream.device_stamps[layer];
    stream.device.call(&pi_gpu_api::stamp, moment == Moment::begin ? &stamps.begin : &stamps.end);
}

// Rows of the block table, one for each sequence of the step, and each token's row.
struct Table {
    std::vector<uint32_t> pages;
    std::vector<uint32_t> row_of_token;
    uint32_t stride = 0;
};

// Steps of about as many pages look the same to a graph: a power of two, or the longest context's.
uint32_t page_bucket(const GpuStream &stream, uint32_t n_pages) {
    return std::min(std::bit_ceil(n_pages), std::max(stream.context_pages, n_pages));
}

Table block_table(const GpuStream &stream, const KvCache &cache, const Step &step) {
    Table table;
    std::map<int32_t, uint32_t> rows;
    std::vector<uint32_t> n_pages;
    for (uint32_t t = 0; t < step.n_tokens(); ++t) {
        const auto [found, added] = rows.try_emplace(step.sequences[t], static_cast<uint32_t>(rows.size()));
        if (added)
            n_pages.push_back(0);
        n_pages[found->second] = std::max(n_pages[found->second], step.end_page(t));
        table.row_of_token.push_back(found->second);
    }
    table.stride = page_bucket(stream, *std::max_element(n_pages.begin(), n_pages.end()));
    table.pages.resize(rows.size() * table.stride);
    for (const auto &[sequence, row] : rows) {
        for (uint32_t page = 0; page < n_pages[row]; ++page)
            table.pages[row * table.stride + page] = cache.page_of(sequence, page * PI_PAGE);
    }
    return table;
}

std::vector<uint32_t> attention_tiles(const Step &step) {
    std::vector<uint32_t> tiles;
    for (uint32_t begin = 0, end = 0; begin < step.n_tokens(); begin = end) {
        while (end < step.n_tokens() && end - begin < tile_tokens &&
               step.sequences[end] == step.sequences[begin])
            ++end;
        tiles.insert(tiles.end(), {begin, end});
    }
    return tiles;
}

void upload_tree(GpuStream &stream, const Step &step) {
    const std::vector<uint64_t> tree = step.slot_tree();
    stream.step.tree = nullptr;
    stream.step.tree_words = 0;
    if (tree.empty())
        return;
    stream.device.call(&pi_gpu_api::upload, tree.data(), tree.size() * sizeof(uint64_t),
                       stream.step_buffers.tree);
    stream.step.tree = stream.step_buffers.tree;
    stream.step.tree_words = static_cast<uint32_t>(tree.size() / step.n_tokens());
}

// The table's entry for a function of this backend.
template <auto function>
struct Entry;

template <typename Result, typename... Args, Result (*function)(GpuStream &, Args...)>
struct Entry<function> {
    static Result call(Stream &stream, Args... args) {
        return function(static_cast<GpuStream &>(stream), args...);
    }
};

constexpr Ops gpu_ops = {
    .name = "gpu",
    .allocate = Entry<allocate>::call,
    .release = Entry<release>::call,
    .begin_step = Entry<gpu_begin_step>::call,
    .begin_graph = Entry<begin_graph>::call,
    .end_graph = Entry<end_graph>::call,
    .abandon_graph = [](Stream &stream) noexcept { abandon_graph(static_cast<GpuStream &>(stream)); },
    .upload = Entry<upload>::call,
    .download = Entry<download>::call,
    .gather = Entry<gather>::call,
    .embed = Entry<embed>::call,
    .rms_norm = Entry<rms_norm>::call,
    .matmul = Entry<matmul>::call,
    .place_heads = Entry<place_heads>::call,
    .attend = Entry<attend>::call,
    .ffn = Entry<gpu_ffn>::call,
    .top = Entry<top>::call,
    .log_probabilities = Entry<log_probabilities>::call,
    .synchronize = Entry<synchronize>::call,
    .expect_shares = nullptr,
    .on_threads = nullptr,
    .time_layers = Entry<time_layers>::call,
    .mark = Entry<mark>::call,
};

// Arrays side by side, as one copy takes them to the device: at the same places whenever all sizes but the
// last array's are the same.
class StepWords {
  public:
    explicit StepWords(const GpuStepBuffers &buffers) : buffers_(buffers) {}

    template <typename T>
    const T *place(const std::vector<T> &values) {
        static_assert(sizeof(T) == sizeof(uint32_t));
        const size_t at = words_.size();
        words_.resize(at + values.size());
        std::memcpy(words_.data() + at, values.data(), values.size() * sizeof(T));
        return reinterpret_cast<const T *>(buffers_.words + at);
    }
    void upload(const GpuDevice &device) const {
        if (words_.size() > buffers_.capacity)
            throw Error(PI_FAILURE, "a step is larger than its place on the device");
        device.call(&pi_gpu_api::upload, words_.data(), words_.size() * sizeof(uint32_t), buffers_.words);
    }

  private:
    const GpuStepBuffers &buffers_;
    std::vector<uint32_t> words_;
};

} // namespace

void gpu_begin_step(GpuStream &stream, const KvCache &cache, const Step &step, const RopeAngles &angles) {
    const uint32_t n = step.n_tokens();
    std::vector<uint32_t> oldest(n), old_length(n);
    uint32_t most_pages = 1;
    for (uint32_t t = 0; t < n; ++t) {
        oldest[t] = step.oldest_visible(t);
        old_length[t] = step.old_length(t);
        most_pages = std::max(most_pages, step.end_page(t) - step.first_page(t));
    }
    const Table table = block_table(stream, cache, step);
    const std::vector<uint32_t> tiles = attention_tiles(step);
    StepWords words(stream.step_buffers);
    stream.counts = nullptr;
    stream.step = {};
    stream.step.n_tokens = n;
    stream.step.table_stride = table.stride;
    stream.step.most_pages = page_bucket(stream, most_pages);
    stream.step.sequence = words.place(table.row_of_token);
    stream.step.slot = words.place(step.slots);
    stream.step.oldest = words.place(oldest);
    stream.step.old_length = words.place(old_length);
    stream.tokens = words.place(step.tokens);
    stream.wanted = words.place(step.rows);
    stream.cosine = words.place(angles.cosine);
    stream.sine = words.place(angles.sine);
    stream.tiles = words.place(tiles);
    stream.n_tiles = static_cast<uint32_t>(tiles.size() / 2);
    stream.step.table = words.place(table.pages);
    words.upload(stream.device);
    upload_tree(stream, step);
    if (stream.hand_over != nullptr)
        stream.hand_over->begin_step();
}

Backend open_gpu_backend(const pi_model &model, const Plan &plan, const GpuPlacement &placement) {
    auto stream = std::make_unique<GpuStream>(model, plan, placement);
    const char *name = stream->name.c_str();
    return {&gpu_ops, std::move(stream), name};
}

std::unique_ptr<KvHome> make_gpu_pages(Stream &stream, const KvShape &shape,
                                       const std::vector<uint8_t> &layers) {
    auto &gpu = static_cast<GpuStream &>(stream);
    auto pages = std::make_unique<GpuPages>(gpu.device, shape, layers);
    gpu.pages = pages.get();
    return pages;
}

HandOver *gpu_hand_over(Stream &stream) {
    return static_cast<GpuStream &>(stream).hand_over.get();
}

ColdWeights *gpu_cold_weights(Stream &stream) {
    return static_cast<GpuStream &>(stream).cold_weights.get();
}

void describe_gpu(const Side &gpu, pi_stats &stats) {
    const auto &stream = static_cast<const GpuStream &>(gpu.stream);
    const pi_gpu_info info = stream.device.info();
    stats.pinned_bytes = stream.pinned.n_bytes();
    if (stream.hand_over != nullptr)
        stats.handover = stream.hand_over->way();
    stats.device = gpu.backend.isa;
    stats.device_context_bytes = info.context_bytes;
    stats.device_bytes = info.context_bytes + info.mapped_bytes + info.graph_limit_bytes;
    stats.device_launches = info.n_launches;
    stats.device_graph_launches = stream.graphs.n_launches();
    stats.scratch_bytes += gpu.buffers.n_bytes();
}

} // namespace pi
