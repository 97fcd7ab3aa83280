// ops.cpp: the CPU backend's row-wise operations and its table.
#include "../isa.h"
#include "../sampler.h"
#include "../top.h"
#include "stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>

namespace pi {
namespace {

float *allocate(CpuStream &, uint64_t n_floats) {
    return static_cast<float *>(::operator new(n_floats * sizeof(float), std::align_val_t{64}));
}

void release(CpuStream &, float *data) {
    ::operator delete(data, std::align_val_t{64});
}

// Operations read cache and step themselves.
void begin_step(CpuStream &stream, const KvCache &, const Step &, const RopeAngles &angles) {
    stream.angles = &angles;
}

void copy(CpuStream &, const float *from, uint64_t n, float *to) {
    std::copy_n(from, n, to);
}

void gather(CpuStream &, const Step &step, const float *x, uint32_t begin, uint32_t n_rows, uint32_t n,
            float *out) {
    for (uint32_t i = 0; i < n_rows; ++i)
        std::copy_n(x + uint64_t{step.rows[begin + i]} * n, n, out + uint64_t{i} * n);
}

void embed(CpuStream &stream, const Matrix &embedding, const Step &step, float *out) {
    const auto dequantize = stream.kernels.type[embedding.type->kernel_index].dequantize;
    stream.pool.run(step.n_tokens(), [&](int64_t i, uint32_t) {
        const auto row = static_cast<uint64_t>(step.tokens[static_cast<size_t>(i)]);
        dequantize(embedding.rows(row, row + 1).base, 0, static_cast<int64_t>(embedding.n_cols),
                   out + i * static_cast<int64_t>(embedding.n_cols));
    });
}

void rms_norm(CpuStream &stream, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
              float *out) {
    stream.pool.run(n_rows, [&](int64_t row, uint32_t) {
        stream.kernels.rms_norm(x + row * n, gain, n, eps, out + row * n);
    });
}

void add(CpuStream &stream, const float *x, uint64_t n, float *y) {
    constexpr int64_t slice = 8192;
    const auto total = static_cast<int64_t>(n);
    stream.pool.run((total + slice - 1) / slice, [&](int64_t i, uint32_t) {
        stream.kernels.add(x + i * slice, std::min(slice, total - i * slice), y + i * slice);
    });
}

void rope(CpuStream &stream, float *x, uint32_t n_tokens, uint32_t n_heads, const ModelConfig &config) {
    const float *cosine = stream.angles->cosine.data(), *sine = stream.angles->sine.data();
    const int64_t width = int64_t{n_heads} * config.head_dim;
    const int64_t pairs = config.n_rot / 2;
    stream.pool.run(n_tokens, [&](int64_t token, uint32_t) {
        stream.kernels.rope(x + token * width, n_heads, config.head_dim, config.n_rot, cosine + token * pairs,
                            sine + token * pairs);
    });
}

// K of a head becomes column `at` of [head_dim, PI_PAGE], V row `at` of [PI_PAGE, head_dim].
template <typename T>
void store_head(const T *k, const T *v, uint32_t head_dim, uint32_t at, uint8_t *page_k, uint8_t *page_v) {
    for (uint32_t i = 0; i < head_dim; ++i)
        reinterpret_cast<T *>(page_k)[i * PI_PAGE + at] = k[i];
    std::memcpy(page_v + uint64_t{at} * head_dim * sizeof(T), v, head_dim * sizeof(T));
}

void store_token(const CpuStream &stream, const KvCache &cache, const Step &step, uint32_t layer,
                 uint32_t token, const float *k, const float *v, pi_half *halves) {
    const KvShape &shape = cache.shape();
    const uint32_t slot = step.slots[token];
    const uint32_t page = cache.page_of(step.sequences[token], slot);
    for (uint32_t head = 0; head < shape.n_kv_heads; ++head, k += shape.head_dim, v += shape.head_dim) {
        uint8_t *page_k = cache.head(layer, page, head);
        uint8_t *page_v = page_k + shape.half_bytes();
        if (shape.element_bytes == sizeof(float)) {
            store_head(k, v, shape.head_dim, slot % PI_PAGE, page_k, page_v);
        } else {
            stream.kernels.to_half(k, shape.head_dim, halves);
            stream.kernels.to_half(v, shape.head_dim, halves + shape.head_dim);
            store_head(halves, halves + shape.head_dim, shape.head_dim, slot % PI_PAGE, page_k, page_v);
        }
    }
}

void store_kv(CpuStream &stream, const KvCache &cache, const Step &step, uint32_t layer, const float *k,
              const float *v) {
    const uint64_t head_dim = cache.shape().head_dim;
    const uint64_t width = cache.shape().n_kv_heads * head_dim;
    auto *halves = stream.heads.as<pi_half>(stream.pool.n_threads() * 2 * head_dim);
    stream.pool.run(step.n_tokens(), [&](int64_t token, uint32_t thread) {
        const auto at = static_cast<uint64_t>(token) * width;
        store_token(stream, cache, step, layer, static_cast<uint32_t>(token), k + at, v + at,
                    halves + thread * 2 * head_dim);
    });
}

void matmul(CpuStream &stream, std::span<const Product> products, const float *x, const InputNorm *norm,
            const uint32_t *positions, uint32_t n_tokens) {
    if (norm != nullptr) {
        rms_norm(stream, x, norm->gain, n_tokens, static_cast<uint32_t>(products[0].matrix->n_cols),
                 norm->eps, norm->out);
        x = norm->out;
    }
    if (!products[0].add)
        return cpu_matmul(stream, products, x, positions, n_tokens);
    Product product = products[0]; // an output that is added to is alone
    const uint64_t n = n_tokens * (product.row_end - product.row_begin);
    product.out = stream.sums.floats(n);
    cpu_matmul(stream, {&product, 1}, x, positions, n_tokens);
    add(stream, product.out, n, products[0].out);
}

void ffn(CpuStream &stream, const FfnArgs &args) {
    const uint32_t n_embd = args.config->n_embd;
    if (args.norm != nullptr)
        rms_norm(stream, args.residual, args.norm->gain, args.n_tokens, n_embd, args.norm->eps,
                 args.norm->out);
    cpu_ffn(stream, args);
    if (args.add_to != nullptr)
        add(stream, args.out, uint64_t{args.n_tokens} * n_embd, args.add_to);
}

void place_heads(CpuStream &stream, const AttentionArgs &args, float *q, float *k, const float *v) {
    const ModelConfig &config = *args.config;
    rope(stream, q, args.step->n_tokens(), config.n_heads, config);
    rope(stream, k, args.step->n_tokens(), config.n_kv_heads, config);
    store_kv(stream, *args.cache, *args.step, args.layer, k, v);
}

void top(CpuStream &stream, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top,
         float *out) {
    const uint32_t each = (n_vocab + TopPart::n_logits - 1) / TopPart::n_logits;
    std::vector<TopPart> parts;
    parts.reserve(size_t{n_rows} * each);
    while (parts.size() < size_t{n_rows} * each)
        parts.emplace_back(n_top);
    stream.pool.run(static_cast<int64_t>(parts.size()), [&](int64_t i, uint32_t) {
        const uint32_t begin = static_cast<uint32_t>(i % each) * TopPart::n_logits;
        const uint32_t end = std::min(n_vocab, begin + TopPart::n_logits);
        parts[static_cast<size_t>(i)].search(logits + i / each * n_vocab, begin, end);
    });
    for (uint64_t row = 0; row < n_rows; ++row)
        merge_top({parts.data() + row * each, each}, n_top, out + row * top_words(n_top));
}

void log_probabilities(CpuStream &stream, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                       const int32_t *targets, float *host) {
    stream.pool.run(n_rows, [&](int64_t i, uint32_t) {
        host[i] = targets[i] < 0 ? std::numeric_limits<float>::quiet_NaN()
                                 : log_probability(logits + i * n_vocab, n_vocab, targets[i]);
    });
}

void synchronize(CpuStream &) {} // every operation is done when it returns

void expect_shares(CpuStream &stream, bool on) {
    stream.pool.stay_awake(on);
}

void on_threads(CpuStream &stream, const std::function<void(uint32_t part, uint32_t n_parts)> &task) {
    const uint32_t n_parts = stream.pool.n_threads();
    stream.pool.run(n_parts, [&](int64_t part, uint32_t) { task(static_cast<uint32_t>(part), n_parts); });
}

void time_layers(CpuStream &stream, uint32_t n_layers) {
    stream.all_stamps.assign(n_layers, {});
    stream.stamps = n_layers == 0 ? nullptr : stream.all_stamps.data();
}

void mark(CpuStream &stream, uint32_t layer, Moment moment) {
    if (stream.stamps == nullptr)
        return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
    LayerStamps &stamps = stream.stamps[layer];
    (moment == Moment::begin ? stamps.begin : stamps.end) = static_cast<uint64_t>(ns);
}

// The table's entry for a function of this backend: the stream that an engine holds is the one opened here.
template <auto function>
struct Entry;

template <typename Result, typename... Args, Result (*function)(CpuStream &, Args...)>
struct Entry<function> {
    static Result call(Stream &stream, Args... args) {
        return function(static_cast<CpuStream &>(stream), args...);
    }
};

constexpr Ops cpu_ops = {
    .name = "cpu",
    .allocate = Entry<allocate>::call,
    .release = Entry<release>::call,
    .begin_step = Entry<begin_step>::call,
    .begin_graph = nullptr,
    .end_graph = nullptr,
    .abandon_graph = nullptr,
    .upload = Entry<copy>::call,
    .download = Entry<copy>::call,
    .gather = Entry<gather>::call,
    .embed = Entry<embed>::call,
    .rms_norm = Entry<rms_norm>::call,
    .matmul = Entry<matmul>::call,
    .place_heads = Entry<place_heads>::call,
    .attend = Entry<cpu_attend>::call,
    .ffn = Entry<ffn>::call,
    .top = Entry<top>::call,
    .log_probabilities = Entry<log_probabilities>::call,
    .synchronize = Entry<synchronize>::call,
    .expect_shares = Entry<expect_shares>::call,
    .on_threads = Entry<on_threads>::call,
    .time_layers = Entry<time_layers>::call,
    .mark = Entry<mark>::call,
};

} // namespace

Backend open_cpu_backend(uint32_t n_threads, const char *isa, bool int8_activations) {
    const pi_kernels &kernels = select_kernels(isa);
    return {&cpu_ops, std::make_unique<CpuStream>(n_threads, kernels, int8_activations), kernels.name};
}

} // namespace pi
